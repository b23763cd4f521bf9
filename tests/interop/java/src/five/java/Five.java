import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;

/** What only 5.x's clients have. */
public final class Five implements Peer.Runs {
    private final Peer peer;

    public Five(Peer peer) {
        this.peer = peer;
    }

    @Override
    public void run(String mode) throws Exception {
        switch (mode) {
            case "timers" -> timers();
            case "pop" -> pop();
            default -> throw new IllegalArgumentException(mode);
        }
    }

    /** Takes messages of a topic that the group shares. mode: fail-once says of each message the first time that it failed. */
    private void pop() throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(peer.get("group"), peer.hook());
        consumer.setNamesrvAddr(peer.get("ns"));
        consumer.setClientRebalance(false);
        consumer.setPopInvisibleTime(60_000);
        consumer.subscribe(peer.get("topic"), peer.get("tags", "*"));
        boolean failsOnce = peer.get("mode", "").equals("fail-once");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(Peer::got);
            boolean again = failsOnce && messages.get(0).getReconsumeTimes() == 0;
            return again ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        Peer.say("STARTED");
        Peer.waitForStdin();
        consumer.shutdown();
        Peer.say("ENDED");
    }

    /** Sends to times in each of the three ways, then one that it takes back, twice, and one that is too far. */
    private void timers() throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("java_producers", peer.hook());
        producer.setNamesrvAddr(peer.get("ns"));
        producer.setSendMsgTimeout(100_000);
        producer.start();
        long now = System.currentTimeMillis();
        Message seconds = new Message(peer.get("topic"), Peer.bytes("seconds"));
        seconds.setDelayTimeSec(60);
        Message millis = new Message(peer.get("topic"), Peer.bytes("millis"));
        millis.setDelayTimeMs(61_500);
        Message at = new Message(peer.get("topic"), Peer.bytes("at"));
        at.setDeliverTimeMs(now + 63_000);
        Message back = new Message(peer.get("topic"), Peer.bytes("taken-back"));
        back.setDelayTimeMs(62_000);
        for (Message message : new Message[] {seconds, millis, at}) {
            SendResult sent = producer.send(message);
            Peer.say("SENT " + sent.getSendStatus() + " " + (sent.getRecallHandle() != null));
        }
        SendResult sent = producer.send(back);
        for (int tries = 0; tries < 2; tries++) {
            try {
                String id = producer.recallMessage(peer.get("topic"), sent.getRecallHandle());
                Peer.say("RECALLED " + id.equals(sent.getMsgId()));
            } catch (Exception error) {
                Peer.say("NOT-RECALLED " + error.getMessage().contains("208"));
            }
        }
        try {
            Message far = new Message(peer.get("topic"), Peer.bytes("far"));
            far.setDelayTimeSec(41L * 86_400);
            Peer.say("SENT " + producer.send(far));
        } catch (Exception error) {
            Peer.say("REFUSED " + error.getMessage().contains("CODE: 13"));
        }
        Peer.say("ENDED");
        producer.shutdown();
    }
}
