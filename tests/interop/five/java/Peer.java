import java.io.IOException;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.Scanner;
import java.util.TreeSet;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.LitePushConsumer;
import org.apache.rocketmq.client.apis.consumer.OffsetOption;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/** The unmodified official Java client of 5.x, driven by the tests: `Peer MODE name=value...`. Prints what happens, a line each,
 * and ends when stdin does. */
public class Peer {
    static final Map<String, String> options = new HashMap<>();
    static final PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    static final ClientServiceProvider provider = ClientServiceProvider.loadService();

    public static void main(String[] arguments) throws Exception {
        for (int i = 1; i < arguments.length; i++) {
            String[] pair = arguments[i].split("=", 2);
            options.put(pair[0], pair[1]);
        }
        try {
            switch (arguments[0]) {
                case "produce" -> produce();
                case "urgent" -> urgent();
                case "push" -> push();
                case "simple" -> simple();
                case "lite" -> lite();
                default -> throw new IllegalArgumentException(arguments[0]);
            }
        } catch (Throwable fault) {
            say("FAILED", fault);
        }
        Runtime.getRuntime().halt(0); // a push consumer would wait for its long polls
    }

    static synchronized void say(Object... words) {
        StringBuilder line = new StringBuilder();
        for (Object word : words) {
            line.append(line.length() == 0 ? "" : " ").append(word);
        }
        out.println(line);
    }

    static String topic() {
        return options.getOrDefault("topic", "t");
    }

    static ClientConfiguration configuration() {
        var builder = ClientConfiguration.newBuilder().setEndpoints(options.get("endpoint"));
        if (!options.containsKey("tls")) {
            builder.enableSsl(false);
        }
        if (options.containsKey("access")) {
            builder.setCredentialProvider(new StaticSessionCredentialsProvider(options.get("access"), options.get("secret")));
        }
        return builder.build();
    }

    static MessageBuilder message(String body) {
        return provider.newMessageBuilder().setTopic(topic()).setBody(body.getBytes(StandardCharsets.UTF_8));
    }

    static String text(ByteBuffer body) {
        return StandardCharsets.UTF_8.decode(body.duplicate()).toString();
    }

    /** The first time, or always. */
    static boolean isBad(MessageView view) {
        String body = text(view.getBody());
        return body.equals("worse") || body.equals("bad") && view.getDeliveryAttempt() == 1;
    }

    static void got(MessageView view) {
        String keys = view.getKeys().isEmpty() ? "-" : String.join(",", view.getKeys());
        String color = view.getProperties().getOrDefault("farbe", "");
        say("GOT", view.getTopic(), view.getTag().orElse("-"), keys, view.getDeliveryAttempt(), text(view.getBody()), color);
    }

    static void waitForStdin() throws IOException {
        while (System.in.read() >= 0) { }
    }

    static SendReceipt send(Producer producer, Message message) throws Exception {
        SendReceipt receipt = producer.send(message);
        say("SENT", receipt.getMessageId(), text(message.getBody()));
        return receipt;
    }

    static void produce() throws Exception {
        Producer producer = provider.newProducerBuilder().setClientConfiguration(configuration()).setTopics(topic())
            .setTransactionChecker(view -> {
                say("ASKED", text(view.getBody()));
                return TransactionResolution.COMMIT;
            }).build();
        say("STARTED");
        for (int number = 0; number < 5; number++) {
            send(producer, message("normal-" + number).setTag("TagA").setKeys("key-" + number)
                .addProperty("farbe", "grün").build());
        }
        for (int number = 0; number < 5; number++) {
            send(producer, message("fifo-" + number).setMessageGroup("mg").build());
        }
        for (String body : new String[] {"delayed", "recalled"}) {
            SendReceipt receipt = send(producer, message(body).setDeliveryTimestamp(System.currentTimeMillis() + 2000).build());
            if (body.equals("recalled")) {
                producer.recallMessage(topic(), receipt.getRecallHandle());
            }
        }
        for (String body : new String[] {"committed", "rolled-back", "unknown"}) {
            Transaction transaction = producer.beginTransaction();
            producer.send(message(body).build(), transaction);
            if (body.equals("committed")) {
                transaction.commit();
            } else if (body.equals("rolled-back")) {
                transaction.rollback();
            }
        }
        say("DONE");
        waitForStdin();
    }

    /** Sends messages with priorities, the least urgent first. */
    static void urgent() throws Exception {
        Producer producer = provider.newProducerBuilder().setClientConfiguration(configuration()).setTopics(topic()).build();
        for (int priority = 1; priority < 4; priority++) {
            send(producer, message("priority-" + priority).setPriority(priority).build());
        }
        say("DONE");
        waitForStdin();
    }

    static Map<String, FilterExpression> filters() {
        return Map.of(topic(), new FilterExpression(options.getOrDefault("tags", "*")));
    }

    static void push() throws Exception {
        provider.newPushConsumerBuilder().setClientConfiguration(configuration())
            .setConsumerGroup(options.getOrDefault("group", "g")).setSubscriptionExpressions(filters())
            .setMessageListener(view -> {
                got(view);
                return isBad(view) ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
            }).build();
        say("STARTED");
        waitForStdin();
    }

    static void simple() throws Exception {
        SimpleConsumer consumer = provider.newSimpleConsumerBuilder().setClientConfiguration(configuration())
            .setConsumerGroup(options.getOrDefault("group", "g")).setSubscriptionExpressions(filters())
            .setAwaitDuration(Duration.ofSeconds(5)).build();
        say("STARTED");
        Thread receiving = new Thread(() -> {
            try {
                while (true) {
                    for (MessageView view : consumer.receive(16, Duration.ofSeconds(15))) {
                        got(view);
                        if (isBad(view)) {
                            consumer.changeInvisibleDuration(view, Duration.ofSeconds(1));
                        } else {
                            consumer.ack(view);
                        }
                    }
                }
            } catch (Throwable fault) {
                say("FAILED", fault);
            }
        });
        receiving.setDaemon(true);
        receiving.start();
        waitForStdin();
    }

    /** Does what each line of stdin says: `send NAME BODY`, `subscribe NAME [OPTION [VALUE]]`, `unsubscribe NAME`, `names`. */
    static void lite() throws Exception {
        LitePushConsumer consumer = provider.newLitePushConsumerBuilder().setClientConfiguration(configuration())
            .bindTopic(topic()).setConsumerGroup(options.getOrDefault("group", "g"))
            .setMessageListener(view -> {
                say("GOT", view.getTopic(), view.getLiteTopic().orElse("-"), "-", view.getDeliveryAttempt(), text(view.getBody()), "");
                return isBad(view) ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
            }).build();
        Producer producer = provider.newProducerBuilder().setClientConfiguration(configuration()).setTopics(topic()).build();
        say("STARTED");
        for (Scanner lines = new Scanner(System.in, StandardCharsets.UTF_8); lines.hasNextLine(); ) {
            String[] words = lines.nextLine().split(" ");
            try {
                switch (words[0]) {
                    case "send" -> producer.send(message(words[2]).setLiteTopic(words[1]).build());
                    case "subscribe" -> {
                        if (words.length == 2) {
                            consumer.subscribeLite(words[1]);
                        } else {
                            consumer.subscribeLite(words[1], option(words));
                        }
                    }
                    case "unsubscribe" -> consumer.unsubscribeLite(words[1]);
                    case "names" -> say("NAMES", String.join(",", new TreeSet<>(consumer.getLiteTopicSet())));
                    default -> throw new IllegalArgumentException(words[0]);
                }
                say("DID", String.join(" ", words));
            } catch (Exception fault) {
                say("REFUSED", fault.getClass().getSimpleName(), fault);
            }
        }
    }

    static OffsetOption option(String[] words) {
        return switch (words[2]) {
            case "min" -> OffsetOption.MIN_OFFSET;
            case "max" -> OffsetOption.MAX_OFFSET;
            case "last" -> OffsetOption.LAST_OFFSET;
            case "offset" -> OffsetOption.ofOffset(Long.parseLong(words[3]));
            case "tail" -> OffsetOption.ofTailN(Long.parseLong(words[3]));
            case "time" -> OffsetOption.ofTimestamp(Long.parseLong(words[3]));
            default -> throw new IllegalArgumentException(words[2]);
        };
    }
}
