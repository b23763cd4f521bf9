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
            default -> throw new IllegalArgumentException(mode);
        }
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
