import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.protocol.heartbeat.MessageModel;

/** An unmodified Apache client, driven by the tests: it prints what happens, a line each, and ends when stdin does. */
public final class Peer {
    private static synchronized void say(String line) {
        System.out.println(line);
        System.out.flush();
    }

    public static void main(String[] args) {
        try {
            run(args);
        } catch (Exception error) {
            say("FAILED " + error);
            System.exit(1); // a client's threads would keep the process
        }
    }

    private static void run(String[] args) throws Exception {
        switch (args[0]) {
            case "produce" -> produce(args[1], args[2], Integer.parseInt(args[3]));
            case "batch" -> batch(args[1], args[2], Integer.parseInt(args[3]));
            case "consume" -> consume(args[1], args[2], args[3], args[4], args[5]);
            default -> throw new IllegalArgumentException(args[0]);
        }
    }

    private static DefaultMQProducer producer(String nameServer) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("java_producers");
        producer.setNamesrvAddr(nameServer);
        producer.start();
        return producer;
    }

    private static void produce(String nameServer, String topic, int count) throws Exception {
        DefaultMQProducer producer = producer(nameServer);
        for (int number = 0; number < count; number++) {
            String body = number % 2 == 0 ? "java-" + number : "java-" + number + "-" + "x".repeat(5000);
            Message message = new Message(topic, number % 2 == 0 ? "even" : "odd", "key-" + number, body.getBytes(StandardCharsets.UTF_8));
            message.putUserProperty("farbe", "grün");
            SendResult result = producer.send(message);
            say("SENT " + result.getSendStatus() + " " + result.getMsgId() + " " + result.getOffsetMsgId());
        }
        producer.shutdown();
    }

    private static void batch(String nameServer, String topic, int count) throws Exception {
        DefaultMQProducer producer = producer(nameServer);
        List<Message> messages = new ArrayList<>();
        for (int number = 0; number < count; number++) {
            messages.add(new Message(topic, "tag", ("batch-" + number).getBytes(StandardCharsets.UTF_8)));
        }
        say("SENT " + producer.send(messages).getSendStatus());
        producer.sendOneway(new Message(topic, "batch-oneway".getBytes(StandardCharsets.UTF_8)));
        producer.shutdown();
    }

    private static void consume(String nameServer, String group, String topic, String tags, String mode) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(nameServer);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, tags);
        if (mode.equals("broadcast")) {
            consumer.setMessageModel(MessageModel.BROADCASTING);
        }
        if (mode.equals("orderly")) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                messages.forEach(Peer::got);
                return ConsumeOrderlyStatus.SUCCESS;
            });
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                boolean again = false;
                for (MessageExt message : messages) {
                    got(message);
                    again = again || mode.equals("fail-once") && message.getReconsumeTimes() == 0;
                }
                return again ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        }
        consumer.start();
        say("STARTED");
        while (System.in.read() >= 0) { }
        consumer.shutdown();
        say("ENDED");
    }

    private static void got(MessageExt message) {
        String body = new String(message.getBody(), StandardCharsets.UTF_8);
        say("GOT " + message.getTopic() + " " + message.getQueueId() + " " + message.getQueueOffset() + " "
            + message.getReconsumeTimes() + " " + body.substring(0, Math.min(body.length(), 40)));
    }
}
