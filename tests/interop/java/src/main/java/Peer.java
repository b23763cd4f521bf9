import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.RPCHook;

/** Unmodified Apache clients, driven by the tests: `Peer MODE name=value...`. Prints what happens, a line each, and ends
 * when stdin does. */
public final class Peer {
    final Map<String, String> options = new HashMap<>();

    public static void main(String[] args) {
        try {
            Peer peer = new Peer();
            for (int at = 1; at < args.length; at++) {
                int equals = args[at].indexOf('=');
                peer.options.put(args[at].substring(0, equals), args[at].substring(equals + 1));
            }
            peer.run(args[0]);
            System.exit(0); // some client threads would keep the process
        } catch (Throwable error) {
            say("FAILED " + error);
            System.exit(1);
        }
    }

    private void run(String mode) throws Exception {
        switch (mode) {
            case "consume" -> new Consumers(this).push();
            case "lite", "assign", "pull" -> new Pulls(this).run(mode);
            case "queries" -> new Queries(this).run();
            case "mqadmin" -> Mqadmin.run();
            case "filter" -> Filters.run();
            case "timers", "pop" -> five(mode);
            default -> new Producers(this).run(mode);
        }
    }

    /** What only 5.x has is in a class of its own, which is compiled with its client alone. */
    private void five(String mode) throws Exception {
        ((Runs) Class.forName("Five").getDeclaredConstructor(Peer.class).newInstance(this)).run(mode);
    }

    interface Runs {
        void run(String mode) throws Exception;
    }

    String get(String name) {
        String value = options.get(name);
        if (value == null) {
            throw new IllegalArgumentException("missing " + name + "=");
        }
        return value;
    }

    String get(String name, String otherwise) {
        return options.getOrDefault(name, otherwise);
    }

    int number(String name, int otherwise) {
        return Integer.parseInt(get(name, String.valueOf(otherwise)));
    }

    /** Signs the client's requests, if it has keys: access, secret. */
    RPCHook hook() {
        return options.containsKey("access") ? new AclClientRPCHook(new SessionCredentials(get("access"), get("secret"))) : null;
    }

    static synchronized void say(String line) {
        System.out.println(line);
        System.out.flush();
    }

    static void waitForStdin() throws Exception {
        while (System.in.read() >= 0) { }
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static String text(byte[] body) {
        String text = new String(body, StandardCharsets.UTF_8);
        return text.substring(0, Math.min(text.length(), 40));
    }

    static void got(MessageExt message) {
        say("GOT " + message.getTopic() + " " + message.getQueueId() + " " + message.getQueueOffset() + " "
            + message.getReconsumeTimes() + " " + text(message.getBody()) + " " + System.currentTimeMillis());
    }
}
