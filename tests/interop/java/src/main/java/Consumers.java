import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.protocol.heartbeat.MessageModel;

final class Consumers {
    private final Peer peer;
    private DefaultMQProducer onward;

    Consumers(Peer peer) {
        this.peer = peer;
    }

    /** topic: names joined by commas. forward: a topic to which each handler sends its message on. mode: concurrently, orderly, broadcast, fail-once, fail-always, suspend-once, suspend-always. */
    void push() throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(
            peer.get("group"), peer.hook(), new AllocateMessageQueueAveragely());
        consumer.setNamesrvAddr(peer.get("ns"));
        consumer.setMqClientApiTimeout(100_000);
        consumer.setVipChannelEnabled(peer.get("vip", "false").equals("true"));
        consumer.setConsumeFromWhere(ConsumeFromWhere.valueOf(peer.get("from", "CONSUME_FROM_FIRST_OFFSET")));
        if (peer.options.containsKey("timestamp")) {
            consumer.setConsumeTimestamp(peer.get("timestamp"));
        }
        for (String topic : peer.get("topic").split(",")) {
            if (peer.options.containsKey("sql")) {
                consumer.subscribe(topic, MessageSelector.bySql(peer.get("sql")));
            } else {
                consumer.subscribe(topic, peer.get("tags", "*"));
            }
        }
        consumer.setConsumeMessageBatchMaxSize(peer.number("batch", 1));
        consumer.setMaxReconsumeTimes(peer.number("tries", -1));
        consumer.setPullThresholdForQueue(peer.number("cached", 1000));
        consumer.setAwaitTerminationMillisWhenShutdown(peer.number("await-ms", 0));
        consumer.setConsumeTimeout(peer.number("check-minutes", 15));
        String mode = peer.get("mode", "concurrently");
        if (mode.equals("broadcast")) {
            consumer.setMessageModel(MessageModel.BROADCASTING);
        }
        if (mode.equals("orderly") || mode.startsWith("suspend-")) {
            AtomicBoolean suspends = new AtomicBoolean(mode.startsWith("suspend-"));
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                messages.forEach(Peer::got);
                work();
                return suspends.getAndSet(mode.equals("suspend-always")) ? ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT : ConsumeOrderlyStatus.SUCCESS;
            });
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                boolean again = mode.equals("fail-always");
                if (messages.size() > 1) {
                    Peer.say("TOGETHER " + messages.size());
                }
                for (MessageExt message : messages) {
                    forward(message);
                    Peer.got(message);
                    again = again || mode.equals("fail-once") && message.getReconsumeTimes() == 0;
                }
                context.setDelayLevelWhenNextConsume(peer.number("level", 0));
                work();
                return again ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        }
        if (peer.options.containsKey("forward")) {
            onward = new DefaultMQProducer("onward", peer.hook());
            onward.setNamesrvAddr(peer.get("ns"));
            onward.start();
        }
        consumer.start();
        consumer.setConsumeTimeout(peer.number("timeout-minutes", 15)); // the interval of its checks stays
        Peer.say("STARTED");
        Peer.waitForStdin();
        consumer.shutdown();
        if (onward != null) {
            onward.shutdown();
        }
        Peer.say("ENDED");
    }

    private void forward(MessageExt message) {
        try {
            if (onward != null) {
                onward.send(new Message(peer.get("forward"), message.getBody()));
            }
        } catch (Exception error) {
            throw new IllegalStateException(error);
        }
    }

    private void work() {
        try {
            Thread.sleep(peer.number("work-ms", 0));
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }
}
