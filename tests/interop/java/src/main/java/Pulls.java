import java.util.ArrayList;
import java.util.Collection;
import java.util.Iterator;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Consumers that ask for messages themselves: lite pull by subscription and by assignment, and the old pull consumer. */
@SuppressWarnings("deprecation")
final class Pulls {
    private final Peer peer;

    Pulls(Peer peer) {
        this.peer = peer;
    }

    void run(String mode) throws Exception {
        switch (mode) {
            case "lite" -> lite();
            case "assign" -> assign();
            default -> pull();
        }
    }

    private DefaultLitePullConsumer consumer() {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(peer.get("group"), peer.hook());
        consumer.setNamesrvAddr(peer.get("ns"));
        consumer.setMqClientApiTimeout(100_000);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        return consumer;
    }

    private void poll(DefaultLitePullConsumer consumer, int wanted) {
        int found = 0;
        while (found < wanted) {
            for (MessageExt message : consumer.poll(1000)) {
                Peer.got(message);
                found++;
            }
        }
    }

    private void lite() throws Exception {
        DefaultLitePullConsumer consumer = consumer();
        consumer.subscribe(peer.get("topic"), peer.get("tags", "*"));
        consumer.setAutoCommit(false);
        consumer.start();
        Peer.say("STARTED");
        poll(consumer, peer.number("count", 20));
        consumer.commitSync();
        Peer.say("COMMITTED");
        Peer.waitForStdin();
        consumer.shutdown();
    }

    /**
     * Reads everything, seeks back in one queue, reads that again, and the same in another. It seeks when no pull finds
     * anything: one that has just found messages gives them in spite of a seek, and so twice. And it reads before it seeks
     * again: a seek interrupts a thread that may pull for another queue by then, whose own seek is forgotten.
     */
    private void assign() throws Exception {
        DefaultLitePullConsumer consumer = consumer();
        consumer.setAutoCommit(false);
        consumer.start();
        Collection<MessageQueue> queues = consumer.fetchMessageQueues(peer.get("topic"));
        consumer.assign(queues);
        poll(consumer, peer.number("count", 20));
        Iterator<MessageQueue> each = queues.iterator();
        MessageQueue first = each.next();
        MessageQueue second = each.next();
        Peer.say("SEEK " + first.getBrokerName() + "-" + first.getQueueId() + " " + second.getBrokerName() + "-" + second.getQueueId());
        consumer.seek(first, 1);
        poll(consumer, 4);
        consumer.seekToBegin(second);
        poll(consumer, 5);
        consumer.commitSync();
        Peer.say("COMMITTED " + consumer.committed(first) + " " + consumer.committed(second));
        Peer.say("BY-TIME " + consumer.offsetForTimestamp(first, 0L));
        consumer.shutdown();
    }

    private void pull() throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(peer.get("group"), peer.hook());
        consumer.setNamesrvAddr(peer.get("ns"));
        consumer.setMqClientApiTimeout(100_000);
        consumer.start();
        List<MessageQueue> queues = new ArrayList<>(consumer.fetchSubscribeMessageQueues(peer.get("topic")));
        for (MessageQueue queue : queues) {
            long offset = consumer.minOffset(queue);
            while (true) {
                PullResult result = consumer.pull(queue, peer.get("tags", "*"), offset, 7);
                offset = result.getNextBeginOffset();
                if (result.getPullStatus() == PullStatus.FOUND) {
                    result.getMsgFoundList().forEach(Peer::got);
                } else if (result.getPullStatus() != PullStatus.NO_MATCHED_MSG) {
                    break;
                }
            }
            consumer.updateConsumeOffset(queue, offset);
            consumer.getOffsetStore().persistAll(new java.util.HashSet<>(queues));
            consumer.maxOffset(queue); // answered after the commit, which is one-way, was read
            Peer.say("READ " + queue.getQueueId() + " " + offset + " " + consumer.maxOffset(queue) + " "
                + consumer.fetchConsumeOffset(queue, true));
        }
        Peer.say("ENDED");
        consumer.shutdown();
    }
}
