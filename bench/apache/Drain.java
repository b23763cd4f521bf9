import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;

/** Apache's Java push consumer on a backlog, with a listener that only counts. `Drain ADDRESS GROUP COUNT BATCH` prints
 * `RATE messages/s`, from the first message to the last. */
public final class Drain {
    public static void main(String[] args) throws Exception {
        int count = Integer.parseInt(args[2]);
        int batch = Integer.parseInt(args[3]);
        AtomicInteger seen = new AtomicInteger();
        AtomicLong began = new AtomicLong();
        CountDownLatch done = new CountDownLatch(1);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(args[1]);
        consumer.setNamesrvAddr(args[0]);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeMessageBatchMaxSize(batch);
        consumer.setPullBatchSize(256);
        consumer.subscribe("backlog", "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            began.compareAndSet(0, System.nanoTime());
            if (seen.addAndGet(messages.size()) >= count) {
                done.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        done.await();
        System.out.println("RATE " + count / ((System.nanoTime() - began.get()) / 1e9));
        System.out.flush();
        consumer.shutdown();
        System.exit(0);
    }
}
