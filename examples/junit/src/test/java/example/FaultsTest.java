package example;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.BooleanSupplier;
import java.util.stream.IntStream;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.exception.RemotingException;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

/** What goes wrong between services and a broker once a year, as often as one likes. The client is Apache's, unmodified. */
class FaultsTest {
    private static Rocketlet broker;
    private static int instances;

    private final List<Runnable> started = new ArrayList<>();

    @BeforeAll
    static void startBroker() throws Exception {
        broker = Rocketlet.start();
        DefaultMQProducer first = producer(); // loads the client's classes
        first.start();
        first.send(new Message("warm", new byte[1]));
        first.shutdown();
    }

    @AfterAll
    static void stopBroker() {
        broker.close();
    }

    @BeforeEach
    void prepare() {
        broker.clean();
        broker.createTopic("orders", 1);
        broker.createGroup("shipping");
    }

    @AfterEach
    void stopClients() {
        broker.endFaults();
        started.forEach(Runnable::run);
    }

    @Test
    void aMessageThatAlwaysFailsIsADeadLetterAfterSixteenRetries() throws Exception {
        List<Integer> tries = new CopyOnWriteArrayList<>();
        start(consumer(), (MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(message -> tries.add(message.getReconsumeTimes()));
            return ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        broker.waitFor("{'until': 'asked', 'name': 'PULL_MESSAGE', 'count': 2}"); // of the topic and the retry topic
        start(producer()).send(new Message("orders", "poison".getBytes()));
        broker.skipWaitsUntil("{'until': 'dead_letters', 'group': 'shipping'}"); // 4 h 46 min of the broker's time
        assertEquals(IntStream.rangeClosed(0, 16).boxed().toList(), tries);
        assertEquals("poison", broker.deadLetters("shipping").get(0).get("text").asText());
    }

    @Test
    void aTransactionIsCheckedFifteenTimesAndThenGivenUp() throws Exception {
        AtomicInteger checks = new AtomicInteger();
        TransactionMQProducer producer = new TransactionMQProducer("p" + ++instances);
        producer.setSendMsgTimeout(20_000);
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return LocalTransactionState.UNKNOW;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                checks.incrementAndGet();
                return LocalTransactionState.UNKNOW;
            }
        });
        start(producer).sendMessageInTransaction(new Message("orders", "half".getBytes()), null);
        // the broker asks whom it knows by a heartbeat, which the client sends by itself a second after its start
        producer.getDefaultMQProducerImpl().getmQClientFactory().sendHeartbeatToAllBrokerWithLock();
        for (int check = 1; check <= 15; check++) {
            int wanted = check;
            broker.advanceSeconds(60);
            until(() -> checks.get() >= wanted);
        }
        broker.advanceSeconds(180);
        assertEquals(15, checks.get());
        assertEquals(0, broker.messages("orders").size());
    }

    @Test
    void aLeaseEndsWhileItsOwnerIsFrozen() throws Exception {
        List<String> first = new CopyOnWriteArrayList<>();
        List<String> second = new CopyOnWriteArrayList<>();
        DefaultMQPushConsumer owner = consumer();
        start(owner, orderly(first));
        broker.waitFor("{'until': 'rebalanced', 'group': 'shipping', 'members': 1}");
        broker.fault("{'action': 'freeze', 'client': '%s'}".formatted(owner.buildMQClientId()));
        start(consumer(), orderly(second));
        broker.waitFor("{'until': 'members', 'group': 'shipping', 'count': 2}");
        broker.advanceSeconds(150); // longer than a lease, and than a member may be silent
        start(producer()).send(new Message("orders", "A1".getBytes()));
        until(() -> second.size() == 1);
        assertTrue(first.isEmpty());
    }

    @Test
    void aMessageIsStoredButNotAcknowledgedSoItIsStoredTwice() throws Exception {
        DefaultMQProducer producer = start(producer());
        producer.send(new Message("orders", "before".getBytes()));
        broker.fault("{'action': 'close_after', 'code': 'SEND_MESSAGE_V2'}");
        Message order = new Message("orders", "twice".getBytes());
        assertThrows(RemotingException.class, () -> producer.send(order, 300));
        producer.send(order); // as a service does that was told nothing
        var messages = broker.messages("orders");
        assertEquals(3, messages.size());
        assertEquals(messages.get(1).get("text"), messages.get(2).get("text"));
        assertEquals(1, broker.call("GET", "/faults/injected", null).size());
    }

    @Test
    void aLostNotificationDelaysTheRebalanceAndNoMore() throws Exception {
        broker.createTopic("orders", 4);
        DefaultMQPushConsumer one = consumer();
        start(one, concurrently());
        broker.waitFor("{'until': 'rebalanced', 'group': 'shipping', 'members': 1}");
        broker.fault("{'action': 'lose', 'code': 'NOTIFY_CONSUMER_IDS_CHANGED', 'client': '%s'}"
            .formatted(one.buildMQClientId()));
        start(consumer(), concurrently());
        broker.waitFor("{'until': 'injected'}");
        broker.call("POST", "/groups/shipping/rebalance", null); // the next one arrives
        until(() -> {
            broker.advanceSeconds(16); // a pull of a queue that a member has given up stays with the broker for 15 s
            return broker.holds("{'until': 'rebalanced', 'group': 'shipping', 'members': 2}");
        });
    }

    private static DefaultMQProducer producer() {
        DefaultMQProducer producer = new DefaultMQProducer("p" + ++instances);
        producer.setNamesrvAddr(broker.address());
        producer.setInstanceName("i" + instances);
        producer.setSendMsgTimeout(20_000); // on a busy machine, too
        return producer;
    }

    private static DefaultMQPushConsumer consumer() throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("shipping");
        consumer.setNamesrvAddr(broker.address());
        consumer.setInstanceName("i" + ++instances); // two members in one process need two names
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe("orders", "*");
        return consumer;
    }

    private <T extends DefaultMQProducer> T start(T producer) throws Exception {
        producer.setNamesrvAddr(broker.address());
        producer.start();
        started.add(producer::shutdown);
        return producer;
    }

    private void start(DefaultMQPushConsumer consumer, MessageListenerConcurrently listener) throws Exception {
        consumer.registerMessageListener(listener);
        consumer.start();
        started.add(consumer::shutdown);
    }

    private void start(DefaultMQPushConsumer consumer, MessageListenerOrderly listener) throws Exception {
        consumer.registerMessageListener(listener);
        consumer.start();
        started.add(consumer::shutdown);
    }

    private static MessageListenerConcurrently concurrently() {
        return (messages, context) -> ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
    }

    private static MessageListenerOrderly orderly(List<String> bodies) {
        return (messages, context) -> {
            messages.forEach(message -> bodies.add(new String(message.getBody())));
            return ConsumeOrderlyStatus.SUCCESS;
        };
    }

    private static void until(BooleanSupplier condition) throws InterruptedException {
        long end = System.nanoTime() + 20_000_000_000L;
        while (!condition.getAsBoolean()) {
            assertTrue(System.nanoTime() < end, "the condition does not hold after 20 s");
            Thread.sleep(1);
        }
    }
}
