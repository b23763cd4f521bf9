import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/** Members of one group that join and leave on command: `join NAME`, `leave NAME`. Prints
 * when a command is done, and to stderr what each member handles, and when. */
public final class Churn {
    public static void main(String[] args) {
        try {
            obey(args);
            System.exit(0);
        } catch (Exception error) {
            error.printStackTrace();
            System.exit(1); // threads of members that run would keep the process
        }
    }

    private static void obey(String[] args) throws Exception {
        String nameServer = args[0], group = args[1], topic = args[2];
        int handlerMillis = Integer.parseInt(args[3]), threads = Integer.parseInt(args[4]);
        Map<String, DefaultMQPushConsumer> members = new HashMap<>();
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            String[] words = line.split(" ");
            if (words[0].equals("join")) {
                members.put(words[1], member(nameServer, group, topic, words[1], handlerMillis, threads));
            } else {
                members.remove(words[1]).shutdown();
            }
            System.out.println("DONE " + line);
        }
        members.values().forEach(DefaultMQPushConsumer::shutdown);
    }

    private static DefaultMQPushConsumer member(
        String nameServer, String group, String topic, String name, int handlerMillis, int threads) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName(name);
        consumer.setConsumeThreadMin(threads);
        consumer.setConsumeThreadMax(threads);
        consumer.setAwaitTerminationMillisWhenShutdown(5000); // waits for running handlers, as ours do
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                long begin = System.currentTimeMillis();
                try {
                    Thread.sleep(handlerMillis);
                } catch (InterruptedException error) {
                    return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                }
                String body = new String(message.getBody(), StandardCharsets.UTF_8).trim();
                System.err.println("HANDLED " + name + " " + message.getQueueId() + " " + body + " " + begin + " " + System.currentTimeMillis());
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        return consumer;
    }
}
