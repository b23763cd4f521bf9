import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Sends three messages and looks for them in every way that a client has. */
final class Queries {
    private final Peer peer;

    Queries(Peer peer) {
        this.peer = peer;
    }

    void run() throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("java_queries", peer.hook());
        producer.setNamesrvAddr(peer.get("ns"));
        producer.setSendMsgTimeout(100_000);
        producer.setMqClientApiTimeout(100_000); // a busy machine is no failure
        producer.start();
        String topic = peer.get("topic");
        SendResult first = null;
        for (int number = 0; number < 3; number++) {
            SendResult sent = producer.send(new Message(topic, "tag", "order-" + number + " all", Peer.bytes("query-" + number)),
                (queues, message, argument) -> queues.get(0), null);
            first = first == null ? sent : first;
            Thread.sleep(20);
        }
        MessageExt byOffset = producer.viewMessage(peer.get("topic"), first.getOffsetMsgId());
        Peer.say("BY-OFFSET " + Peer.text(byOffset.getBody()) + " " + byOffset.getMsgId().equals(first.getMsgId()));
        MessageExt byUnique = producer.viewMessage(topic, first.getMsgId());
        Peer.say("BY-UNIQUE " + Peer.text(byUnique.getBody()) + " " + byUnique.getMsgId().equals(first.getMsgId()));
        long now = System.currentTimeMillis();
        Peer.say("BY-KEY " + count(producer, topic, "all", now + 60_000, 3) + " "
            + count(producer, topic, "order-1", now + 60_000, 1) + " "
            + count(producer, topic, "all", byOffset.getStoreTimestamp(), 1));
        MessageQueue queue = first.getMessageQueue();
        Peer.say("OFFSETS " + producer.minOffset(queue) + " " + producer.maxOffset(queue) + " "
            + producer.searchOffset(queue, byOffset.getStoreTimestamp()) + " "
            + producer.searchOffset(queue, now + 60_000) + " "
            + (producer.earliestMsgStoreTime(queue) == byOffset.getStoreTimestamp()));
        producer.shutdown();
    }

    /** Asks again until so many are found: Apache's broker indexes in the background, and a busy one answers late. */
    private static int count(DefaultMQProducer producer, String topic, String key, long end, int wanted) {
        int found = 0;
        for (int attempt = 0; attempt < 50 && found < wanted; attempt++) {
            try {
                found = producer.queryMessage(topic, key, 10, 0, end).getMessageList().size();
            } catch (Exception error) { // none was found
            }
        }
        return found;
    }
}
