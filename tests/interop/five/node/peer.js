// The unmodified official Node client of 5.x, driven by the tests: `peer.js MODE name=value...`. Prints what happens, a line
// each, and ends when stdin does.
const readline = require('node:readline');
const {
  ConsumeResult, LitePushConsumerBuilder, OffsetOption, Producer, PushConsumer, SimpleConsumer,
} = require('rocketmq-client-nodejs');

const [mode, ...named] = process.argv.slice(2);
const options = Object.fromEntries(named.map((text) => [text.slice(0, text.indexOf('=')), text.slice(text.indexOf('=') + 1)]));
const topic = options.topic ?? 't';
const quiet = { info() {}, warn() {}, error() {}, debug() {} };
const common = {
  endpoints: options.endpoint,
  namespace: '',
  sslEnabled: 'tls' in options,
  logger: quiet,
  ...(options.access ? { sessionCredentials: { accessKey: options.access, accessSecret: options.secret } } : {}),
};
const say = (...words) => console.log(words.join(' '));
const stdin = mode === 'lite' ? null : new Promise((resolve) => process.stdin.on('end', resolve).resume());

function got(view) {
  const keys = [...(view.keys ?? [])].join(',') || '-';
  const color = view.properties?.get?.('farbe') ?? view.properties?.farbe ?? '';
  say('GOT', view.topic, view.tag || '-', keys, view.deliveryAttempt, view.body.toString(), color);
}

async function produce() {
  const checker = {
    async check(view) {
      say('ASKED', view.body.toString());
      return 1; // COMMIT
    },
  };
  const producer = new Producer({ ...common, topic, checker });
  await producer.startup();
  say('STARTED');
  const send = async (message) => {
    const receipt = await producer.send({ topic, ...message, body: Buffer.from(message.body) });
    say('SENT', receipt.messageId, message.body);
    return receipt;
  };
  for (let number = 0; number < 5; number++) {
    const properties = new Map([['farbe', 'grün']]);
    await send({ body: `normal-${number}`, tag: 'TagA', keys: [`key-${number}`], properties });
  }
  for (let number = 0; number < 5; number++) await send({ body: `fifo-${number}`, messageGroup: 'mg' });
  for (const body of ['delayed', 'recalled']) {
    const receipt = await send({ body, delay: 2000 });
    if (body === 'recalled') await producer.recallMessage(topic, receipt.recallHandle);
  }
  for (const body of ['committed', 'rolled-back', 'unknown']) {
    const transaction = producer.beginTransaction();
    await producer.send({ topic, body: Buffer.from(body) }, transaction);
    if (body === 'committed') await transaction.commit();
    if (body === 'rolled-back') await transaction.rollback();
  }
  say('DONE');
  await stdin;
}

// Messages with priorities, the least urgent first. Node 1.0.8 takes the priority 0 for none
async function urgent() {
  const producer = new Producer({ ...common, topic });
  await producer.startup();
  for (let priority = 1; priority < 4; priority++) {
    await producer.send({ topic, body: Buffer.from(`priority-${priority}`), priority });
  }
  say('DONE');
  await stdin;
}

// The first time, or always
const isBad = (view) => view.body.toString() === 'worse' || (view.body.toString() === 'bad' && view.deliveryAttempt === 1);
const consuming = {
  ...common,
  consumerGroup: options.group ?? 'g',
  subscriptions: new Map([[topic, options.tags ?? '*']]),
};

async function push() {
  const messageListener = {
    async consume(view) {
      got(view);
      return isBad(view) ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
    },
  };
  await new PushConsumer({ ...consuming, messageListener }).startup();
  say('STARTED');
  await stdin;
}

async function simple() {
  const consumer = new SimpleConsumer({ ...consuming, awaitDuration: 5000 });
  await consumer.startup();
  say('STARTED');
  let ended = false;
  stdin.then(() => (ended = true));
  (async () => {
    while (!ended) {
      for (const view of await consumer.receive(16, 15000)) {
        got(view);
        await (isBad(view) ? consumer.changeInvisibleDuration(view, 1000) : consumer.ack(view));
      }
    }
  })().catch((error) => say('FAILED', error));
  await stdin;
}

const offsets = {
  min: () => OffsetOption.MIN_OFFSET,
  max: () => OffsetOption.MAX_OFFSET,
  last: () => OffsetOption.LAST_OFFSET,
  offset: (value) => OffsetOption.ofOffset(Number(value)),
  tail: (value) => OffsetOption.ofTailN(Number(value)),
  time: (value) => OffsetOption.ofTimestamp(Number(value)),
};

// Does what each line of stdin says: `send NAME BODY`, `subscribe NAME [OPTION [VALUE]]`, `unsubscribe NAME`, `names`
async function lite() {
  const messageListener = {
    async consume(view) {
      say('GOT', view.topic, view.liteTopic, '-', view.deliveryAttempt, view.body.toString(), '');
      return isBad(view) ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
    },
  };
  const consumer = await new LitePushConsumerBuilder().setClientConfiguration(common).bindTopic(topic)
    .setConsumerGroup(options.group ?? 'g').setMessageListener(messageListener).build();
  const producer = new Producer({ ...common, topic });
  await producer.startup();
  say('STARTED');
  const commands = {
    send: (liteTopic, body) => producer.send({ topic, liteTopic, body: Buffer.from(body) }),
    subscribe: (name, option, value) =>
      option ? consumer.subscribeLite(name, offsets[option](value)) : consumer.subscribeLite(name),
    unsubscribe: (name) => consumer.unsubscribeLite(name),
    names: () => say('NAMES', [...consumer.getLiteTopicSet()].sort().join(',')),
  };
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [command, ...words] = line.split(' ');
    try {
      await commands[command](...words);
      say('DID', line);
    } catch (error) {
      say('REFUSED', error.name, String(error).split('\n')[0]);
    }
  }
}

({ produce, urgent, push, simple, lite })[mode]().catch((error) => say('FAILED', error)).then(() => process.exit(0));
