import java.io.BufferedReader;
import java.io.InputStreamReader;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** mqadmin, unmodified: a command a line from stdin, its words divided by tabs; what it prints, and then a line of its own. */
final class Mqadmin {
    private Mqadmin() { }

    static void run() throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        System.setErr(System.out);
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            MQAdminStartup.main0(line.split("\t"), null);
            System.out.println("\n== done");
            System.out.flush();
        }
    }
}
