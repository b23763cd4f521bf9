import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.HashMap;
import java.util.Map;
import org.apache.rocketmq.filter.SqlFilter;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.expression.Expression;

/** What Apache's filter makes of an expression and properties: `expression TAB name TAB value TAB ...` a line. */
final class Filters {
    private Filters() { }

    static void run() throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, "UTF-8"));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            Peer.say(verdict(line.split("\t", -1)));
        }
    }

    private static String verdict(String[] parts) {
        Expression expression;
        try {
            expression = new SqlFilter().compile(parts[0]);
        } catch (Throwable error) {
            return "refused";
        }
        Map<String, Object> properties = new HashMap<>();
        for (int at = 1; at + 1 < parts.length; at += 2) {
            properties.put(parts[at], parts[at + 1]);
        }
        try {
            Object value = expression.evaluate(new EvaluationContext() {
                @Override
                public Object get(String name) {
                    return properties.get(name);
                }

                @Override
                public Map<String, Object> keyValues() {
                    return properties;
                }
            });
            return Boolean.TRUE.equals(value) ? "true" : "false";
        } catch (Throwable error) {
            return "false"; // the broker takes it so
        }
    }
}
