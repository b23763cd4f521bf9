import java.util.Arrays;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.LongAdder;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;

/** Threads of Apache's Java producer, each with one synchronous send of 1 KB at a time. `Load ADDRESS THREADS`, then on
 * stdin `run SECONDS` prints `RATE sends/s p50 ms p99 ms`; ends when stdin does. */
public final class Load {
    public static void main(String[] args) throws Exception {
        int threads = Integer.parseInt(args[1]);
        DefaultMQProducer producer = new DefaultMQProducer("java_load");
        producer.setNamesrvAddr(args[0]);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        byte[] body = new byte[1024];
        Arrays.fill(body, (byte) 'x');
        producer.send(new Message("java_load", body));
        System.out.println("READY");
        java.util.Scanner lines = new java.util.Scanner(System.in);
        while (lines.hasNextLine()) {
            String[] words = lines.nextLine().split(" ");
            System.out.println(run(producer, threads, Double.parseDouble(words[1]), body));
            System.out.flush();
        }
        producer.shutdown();
        System.exit(0);
    }

    private static String run(DefaultMQProducer producer, int threads, double seconds, byte[] body) throws Exception {
        long began = System.nanoTime();
        long end = began + (long) (seconds * 1e9);
        LongAdder sent = new LongAdder();
        long[][] waits = new long[threads][];
        CountDownLatch done = new CountDownLatch(threads);
        for (int index = 0; index < threads; index++) {
            int number = index;
            new Thread(() -> {
                long[] mine = new long[1 << 16];
                int count = 0;
                try {
                    for (long before = System.nanoTime(); before < end; ) {
                        producer.send(new Message("java_load", body));
                        long now = System.nanoTime();
                        mine[count++ & 0xFFFF] = now - before;
                        sent.increment();
                        before = now;
                    }
                } catch (Exception error) {
                    System.err.println(error);
                }
                waits[number] = Arrays.copyOf(mine, Math.min(count, mine.length));
                done.countDown();
            }).start();
        }
        done.await();
        double rate = sent.sum() / ((System.nanoTime() - began) / 1e9);
        long[] all = Arrays.stream(waits).flatMapToLong(Arrays::stream).sorted().toArray();
        return "RATE " + rate + " " + all[all.length / 2] / 1e6 + " " + all[(int) (all.length * 0.99)] / 1e6;
    }
}
