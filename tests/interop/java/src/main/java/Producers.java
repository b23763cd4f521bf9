import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.impl.CommunicationMode;
import org.apache.rocketmq.client.impl.MQClientAPIImpl;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.protocol.header.SendMessageRequestHeader;

final class Producers {
    private final Peer peer;

    Producers(Peer peer) {
        this.peer = peer;
    }

    void run(String mode) throws Exception {
        switch (mode) {
            case "produce" -> produce();
            case "sends" -> sends();
            case "batch" -> batch();
            case "errors" -> errors();
            case "transaction" -> transaction();
            case "request" -> request();
            case "reply" -> reply();
            case "trace" -> trace();
            default -> throw new IllegalArgumentException(mode);
        }
    }

    private <P extends DefaultMQProducer> P started(P producer) throws Exception {
        producer.setNamesrvAddr(peer.get("ns"));
        producer.setVipChannelEnabled(peer.get("vip", "false").equals("true"));
        producer.setSendMsgTimeout(100_000);
        producer.setMqClientApiTimeout(100_000); // a busy machine is no failure
        producer.start();
        return producer;
    }

    private DefaultMQProducer producer() throws Exception {
        return started(new DefaultMQProducer(peer.get("group", "java_producers"), peer.hook()));
    }

    interface Send {
        SendResult run() throws Exception;
    }

    /** Java's client gives a name server 3 s, whatever its settings say, which a busy machine may need for a connection. */
    private SendResult patiently(Send send) throws Exception {
        for (int tries = peer.number("route-tries", 30); ; tries--) {
            try {
                return send.run();
            } catch (MQClientException error) {
                if (tries <= 1 || !String.valueOf(error.getMessage()).contains("No route info")) {
                    throw error;
                }
                Thread.sleep(1000);
            }
        }
    }

    private static void sent(String kind, SendResult result) {
        Peer.say("SENT " + kind + " " + result.getSendStatus() + " " + result.getMsgId() + " " + result.getOffsetMsgId()
            + " " + result.getMessageQueue().getQueueId());
    }

    private void produce() throws Exception {
        DefaultMQProducer producer = producer();
        int count = peer.number("count", 20);
        for (int number = 0; number < count; number++) {
            String body = number % 2 == 0 ? "java-" + number : "java-" + number + "-" + "x".repeat(5000);
            String tag = number % 2 == 0 ? "even" : "odd";
            Message message = new Message(peer.get("topic"), tag, "key-" + number, Peer.bytes(body));
            message.putUserProperty("farbe", "grün");
            if (peer.options.containsKey("delay")) {
                message.setDelayTimeLevel(peer.number("delay", 0));
            }
            sent("sync", patiently(() -> producer.send(message)));
        }
        producer.shutdown();
    }

    private void sends() throws Exception {
        DefaultMQProducer producer = producer();
        String topic = peer.get("topic");
        sent("sync", patiently(() -> producer.send(new Message(topic, Peer.bytes("sync")))));
        CountDownLatch done = new CountDownLatch(1);
        producer.send(new Message(topic, Peer.bytes("async")), new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                sent("async", result);
                done.countDown();
            }

            @Override
            public void onException(Throwable error) {
                Peer.say("FAILED " + error);
                done.countDown();
            }
        });
        done.await();
        producer.sendOneway(new Message(topic, Peer.bytes("oneway")));
        MessageQueue queue = producer.fetchPublishMessageQueues(topic).get(2);
        sent("queue", producer.send(new Message(topic, Peer.bytes("queue")), queue));
        sent("selector", producer.send(new Message(topic, Peer.bytes("selector")),
            (queues, message, argument) -> queues.get((Integer) argument), 3));
        producer.shutdown();
    }

    private void batch() throws Exception {
        DefaultMQProducer producer = producer();
        List<Message> messages = new ArrayList<>();
        int count = peer.number("count", 40);
        String filling = "x".repeat(peer.number("size", 0));
        for (int number = 0; number < count; number++) {
            messages.add(new Message(peer.get("topic"), "tag", Peer.bytes("batch-" + number + filling)));
        }
        sent("batch", patiently(() -> producer.send(messages)));
        producer.shutdown();
    }

    /** Requests that a Java user's own checks would not let through, and what the broker says to them. */
    private void errors() throws Exception {
        DefaultMQProducer producer = producer();
        patiently(() -> producer.send(new Message(peer.get("topic"), Peer.bytes("first")))); // so that the broker is known
        MQClientAPIImpl api = producer.getDefaultMQProducerImpl().getmQClientFactory().getMQClientAPIImpl();
        String[][] cases = {
            {"illegal-topic", "no such topic!", "TBW102", "0", "x", ""},
            {"long-topic", "t".repeat(130), "TBW102", "0", "x", ""},
            {"system-topic", "SCHEDULE_TOPIC_XXXX", "TBW102", "0", "x", ""},
            {"half-topic", "RMQ_SYS_TRANS_HALF_TOPIC", "TBW102", "0", "x", ""},
            {"no-topic", "nobody_made_it", "no_such_template", "0", "x", ""},
            {"queue-id", peer.get("topic"), "TBW102", "99", "x", ""},
            {"too-large", peer.get("topic"), "TBW102", "0", "x".repeat(4 * 1024 * 1024 + 1), ""},
            {"properties", peer.get("topic"), "TBW102", "0", "x", "p".repeat(32_760)},
            {"retry-group", "%RETRY%" + "no_group", "TBW102", "0", "x", ""},
        };
        for (String[] item : cases) {
            SendMessageRequestHeader header = new SendMessageRequestHeader();
            header.setProducerGroup("java_producers");
            header.setTopic(item[1]);
            header.setDefaultTopic(item[2]);
            header.setDefaultTopicQueueNums(4);
            header.setQueueId(Integer.parseInt(item[3]));
            header.setSysFlag(0);
            header.setBornTimestamp(System.currentTimeMillis());
            header.setFlag(0);
            header.setReconsumeTimes(0);
            header.setUnitMode(false);
            header.setBatch(false);
            Message message = new Message(item[1], Peer.bytes(item[4]));
            if (!item[5].isEmpty()) {
                message.putUserProperty("long", item[5]);
            }
            header.setProperties(MessageDecoder.messageProperties2String(message.getProperties()));
            try {
                api.sendMessage(peer.get("broker"), "b", message, header, 10_000, CommunicationMode.SYNC, null,
                    producer.getDefaultMQProducerImpl());
                Peer.say("ERROR " + item[0] + " 0 stored");
            } catch (MQBrokerException error) {
                Peer.say("ERROR " + item[0] + " " + error.getResponseCode() + " " + error.getErrorMessage());
            }
        }
        producer.shutdown();
    }

    /** outcome: COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW at once; check: the same when the broker asks. */
    private void transaction() throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer(
            peer.get("group", "java_transactions"), peer.hook());
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return LocalTransactionState.valueOf(peer.get("outcome"));
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                Peer.say("ASKED " + message.getTopic() + " " + message.getProperty("TRANSACTION_CHECK_TIMES") + " "
                    + Peer.text(message.getBody()));
                return LocalTransactionState.valueOf(peer.get("check", "UNKNOW"));
            }
        });
        started(producer);
        if (peer.options.containsKey("body")) {
            sent("half", patiently(() -> producer.sendMessageInTransaction(
                new Message(peer.get("topic"), Peer.bytes(peer.get("body"))), null)));
        } else { // only there to be asked: it must be known to the broker
            patiently(() -> producer.send(new Message(peer.get("topic"), Peer.bytes("hello"))));
            producer.getDefaultMQProducerImpl().getmQClientFactory().sendHeartbeatToAllBrokerWithLock();
        }
        Peer.say("STARTED");
        Peer.waitForStdin();
        producer.shutdown();
    }

    private void request() throws Exception {
        DefaultMQProducer producer = producer();
        patiently(() -> producer.send(new Message(peer.get("topic") + "_warm", Peer.bytes("x")))); // a connection to be answered on
        Message reply = producer.request(new Message(peer.get("topic"), Peer.bytes("ping")), 100_000);
        Peer.say("REPLY " + Peer.text(reply.getBody()));
        producer.shutdown();
    }

    private void reply() throws Exception {
        DefaultMQProducer producer = producer();
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(
            "java_repliers", peer.hook(), new AllocateMessageQueueAveragely());
        consumer.setNamesrvAddr(peer.get("ns"));
        consumer.setMqClientApiTimeout(100_000);
        consumer.subscribe(peer.get("topic"), "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            try {
                for (MessageExt message : messages) {
                    Message answer = MessageUtil.createReplyMessage(message, Peer.bytes("pong to " + Peer.text(message.getBody())));
                    sent("reply", producer.send(answer, 100_000));
                }
            } catch (Exception error) {
                Peer.say("FAILED " + error);
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        Peer.say("STARTED");
        Peer.waitForStdin();
        consumer.shutdown();
        producer.shutdown();
    }

    private void trace() throws Exception {
        DefaultMQProducer producer = started(new DefaultMQProducer("java_traced", peer.hook(), true, null));
        sent("sync", patiently(() -> producer.send(new Message(peer.get("topic"), "tag", "traced-key", Peer.bytes("traced")))));
        Peer.waitForStdin();
        producer.shutdown();
    }
}
