package example;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.net.URI;
import java.net.URLEncoder;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import org.testcontainers.containers.GenericContainer;
import org.testcontainers.containers.wait.strategy.Wait;

/**
 * A broker under test, by its control port. It runs in a container, or where the environment variable ROCKETLET_CONTROL says,
 * such as http://127.0.0.1:9880 of `rocketlet start --control-port 9880`.
 */
final class Rocketlet implements AutoCloseable {
    private static final int BROKER_PORT = 9876;
    private static final int CONTROL_PORT = 9880;
    private static final ObjectMapper JSON = new ObjectMapper();

    private final HttpClient http = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
    private final GenericContainer<?> container;
    private final String control;
    private final String address;

    private Rocketlet(GenericContainer<?> container, String control, String address) {
        this.container = container;
        this.control = control;
        this.address = address == null ? call("GET", "/health", null).get("address").asText() : address;
    }

    static Rocketlet start() {
        String control = System.getenv("ROCKETLET_CONTROL");
        if (control != null) {
            return new Rocketlet(null, control, null);
        }
        String image = System.getenv().getOrDefault("ROCKETLET_IMAGE", "rocketlet");
        GenericContainer<?> container = new GenericContainer<>(image)
            .withEnv("ROCKETLET_CONTROL_PORT", String.valueOf(CONTROL_PORT))
            .withExposedPorts(BROKER_PORT, CONTROL_PORT)
            .waitingFor(Wait.forHttp("/health").forPort(CONTROL_PORT));
        container.start();
        String host = container.getHost() + ":";
        Rocketlet broker = new Rocketlet(
            container, "http://" + host + container.getMappedPort(CONTROL_PORT),
            host + container.getMappedPort(BROKER_PORT));
        // the port is known only now, and clients must be told it
        broker.call("PUT", "/advertised", "{'external': '%s'}".formatted(broker.address));
        return broker;
    }

    /** What clients are given. */
    String address() {
        return address;
    }

    /** Calls the control port; see /openapi.json. JSON may be written with single quotes. Fails with what the broker says. */
    JsonNode call(String method, String path, String json) {
        HttpResponse<String> answer = send(method, path, json);
        if (answer.statusCode() != 200) {
            throw new AssertionError(method + " " + path + ": " + answer.body());
        }
        try {
            return JSON.readTree(answer.body());
        } catch (IOException error) {
            throw new AssertionError(method + " " + path + ": " + answer.body(), error);
        }
    }

    private HttpResponse<String> send(String method, String path, String json) {
        HttpRequest.BodyPublisher body = json == null
            ? HttpRequest.BodyPublishers.noBody()
            : HttpRequest.BodyPublishers.ofString(json.replace('\'', '"'));
        HttpRequest request = HttpRequest.newBuilder(URI.create(control + path)).method(method, body).build();
        try {
            return http.send(request, HttpResponse.BodyHandlers.ofString());
        } catch (IOException | InterruptedException error) {
            throw new AssertionError(method + " " + path, error);
        }
    }

    /** As new: without topics, groups, messages and faults; clients that are still connected are cut off. */
    void clean() {
        call("POST", "/clean", null);
    }

    void createTopic(String topic, int queues) {
        call("PUT", "/topics/" + part(topic), "{'queues': %d}".formatted(queues));
    }

    /** With its retry topic, which a consumer otherwise learns of only after 30 s. */
    void createGroup(String group) {
        call("PUT", "/groups/" + part(group), null);
    }

    void advanceSeconds(int seconds) {
        call("POST", "/clock/advance", "{'seconds': %d}".formatted(seconds));
    }

    void fault(String json) {
        call("POST", "/faults", "[" + json + "]");
    }

    void endFaults() {
        call("DELETE", "/faults", null);
    }

    /** Returns when the condition holds; fails after 20 s with what is missing. */
    JsonNode waitFor(String condition) {
        return call("POST", "/wait-for", "{'condition': " + condition + "}");
    }

    /** Whether it holds now. */
    boolean holds(String condition) {
        return send("POST", "/wait-for", "{'timeout_s': 0, 'condition': " + condition + "}").statusCode() == 200;
    }

    /** As waitFor, and no delayed message waits meanwhile. */
    void skipWaitsUntil(String condition) {
        call("POST", "/wait-for", "{'skip_waits': true, 'condition': " + condition + "}");
    }

    JsonNode messages(String topic) {
        return call("GET", "/topics/" + part(topic) + "/messages", null);
    }

    JsonNode deadLetters(String group) {
        return call("GET", "/groups/" + part(group) + "/dead-letters", null);
    }

    private static String part(String name) {
        return URLEncoder.encode(name, StandardCharsets.UTF_8);
    }

    @Override
    public void close() {
        if (container != null) {
            container.stop();
        }
    }
}
