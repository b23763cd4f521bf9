import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;

/** The official Java client of 5.x: `Five endpoint topic group count threads redeliveries`. Before each phase it prints the name
 * and waits for a line; behind it, it prints the seconds. */
public class Five {
    interface Work {
        void run() throws Exception;
    }

    static final ClientServiceProvider provider = ClientServiceProvider.loadService();

    public static void main(String[] arguments) {
        failing(() -> run(arguments));
        Runtime.getRuntime().halt(0); // it would wait for its long polls
    }

    static void run(String[] arguments) throws Exception {
        String topic = arguments[1];
        int count = Integer.parseInt(arguments[3]), threads = Integer.parseInt(arguments[4]);
        int redeliveries = Integer.parseInt(arguments[5]);
        ClientConfiguration configuration = ClientConfiguration.newBuilder().setEndpoints(arguments[0]).enableSsl(false).build();
        SimpleConsumer consumer = provider.newSimpleConsumerBuilder().setClientConfiguration(configuration)
            .setConsumerGroup(arguments[2]).setAwaitDuration(Duration.ofSeconds(5)) // Apache's proxy refuses shorter ones
            .setSubscriptionExpressions(Map.of(topic, FilterExpression.SUB_ALL)).build();
        consumer.receive(1, Duration.ofSeconds(60)); // the group begins here
        Producer producer = provider.newProducerBuilder().setClientConfiguration(configuration).setTopics(topic).build();
        byte[] body = new byte[1024];
        phase("send", () -> {
            AtomicInteger left = new AtomicInteger(count);
            joined(started(threads, () -> {
                while (left.decrementAndGet() >= 0) {
                    producer.send(provider.newMessageBuilder().setTopic(topic).setBody(body).build());
                }
            }));
        });
        List<Thread> waiting = new ArrayList<>();
        phase("consume", () -> {
            CountDownLatch left = new CountDownLatch(count);
            waiting.addAll(started(threads, () -> {
                while (left.getCount() > 0) {
                    List<CompletableFuture<Void>> acks = new ArrayList<>();
                    for (MessageView view : consumer.receive(32, Duration.ofSeconds(60))) {
                        acks.add(consumer.ackAsync(view));
                    }
                    for (CompletableFuture<Void> ack : acks) {
                        ack.get();
                        left.countDown();
                    }
                }
            }));
            left.await();
        });
        if (redeliveries == 0) {
            return;
        }
        joined(waiting); // the last receives, in vain, would get what is redelivered
        phase("redeliver", () -> {
            for (int number = 0; number < redeliveries; number++) {
                producer.send(provider.newMessageBuilder().setTopic(topic).setBody(body).build());
                consumer.changeInvisibleDuration(next(consumer), Duration.ofSeconds(3));
                long due = System.nanoTime() + 3_000_000_000L;
                MessageView again = next(consumer);
                System.out.println("late " + (System.nanoTime() - due) / 1e6);
                consumer.ack(again);
            }
        });
    }

    static MessageView next(SimpleConsumer consumer) throws Exception {
        while (true) {
            for (MessageView view : consumer.receive(1, Duration.ofSeconds(60))) {
                return view;
            }
        }
    }

    static void phase(String name, Work work) throws Exception {
        System.out.println("phase " + name);
        System.in.read();
        long began = System.nanoTime();
        work.run();
        System.out.println("took " + (System.nanoTime() - began) / 1e9);
    }

    /** Ends the program if the work fails; threads of the client would keep it running. */
    static void failing(Work work) {
        try {
            work.run();
        } catch (Throwable fault) {
            System.out.println("failed " + fault);
            Runtime.getRuntime().halt(1);
        }
    }

    static List<Thread> started(int threads, Work work) {
        List<Thread> running = new ArrayList<>();
        for (int number = 0; number < threads; number++) {
            Thread thread = new Thread(() -> failing(work));
            running.add(thread);
            thread.start();
        }
        return running;
    }

    static void joined(List<Thread> threads) throws Exception {
        for (Thread thread : threads) {
            thread.join();
        }
    }
}
