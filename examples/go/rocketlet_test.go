package shipping

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// Rocketlet is a broker under test, by its control port: the process `rocketlet start --control-port 0`, or where the
// environment variable ROCKETLET_CONTROL says, such as http://127.0.0.1:9880 of a service container.
type Rocketlet struct {
	Address string // what clients are given
	control string
	test    *testing.T
}

// StartRocketlet gives a broker without topics, groups, messages and faults. It ends with the test.
func StartRocketlet(t *testing.T) *Rocketlet {
	t.Helper()
	control := os.Getenv("ROCKETLET_CONTROL")
	if control == "" {
		control = startProcess(t)
	}
	broker := &Rocketlet{control: control, test: t}
	var ready struct{ Address string }
	broker.Call("GET", "/health", "", &ready)
	broker.Address = ready.Address
	broker.Call("POST", "/clean", "", nil)
	return broker
}

func startProcess(t *testing.T) string {
	t.Helper()
	command := exec.Command("rocketlet", "start", "--port", "0", "--control-port", "0", "--log-level", "error")
	said, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Skipf("no rocketlet, install it with pip install 'rocketlet[control]': %v", err)
	}
	t.Cleanup(func() {
		_ = command.Process.Signal(os.Interrupt)
		_ = command.Wait()
	})
	lines := bufio.NewScanner(said)
	for lines.Scan() {
		if _, url, found := strings.Cut(lines.Text(), "Control  "); found {
			return strings.TrimSuffix(url, "/openapi.json")
		}
	}
	t.Fatal("rocketlet ended before it was ready")
	return ""
}

// Call asks the control port; see /openapi.json. It fails the test with what the broker says. answer may be nil.
func (broker *Rocketlet) Call(method, path, body string, answer any) {
	broker.test.Helper()
	request, err := http.NewRequest(method, broker.control+path, bytes.NewBufferString(body))
	if err != nil {
		broker.test.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		broker.test.Fatal(err)
	}
	defer response.Body.Close()
	said, err := io.ReadAll(response.Body)
	if err != nil {
		broker.test.Fatal(err)
	}
	if response.StatusCode != http.StatusOK {
		broker.test.Fatalf("%s %s: %s", method, path, said)
	}
	if answer != nil {
		if err := json.Unmarshal(said, answer); err != nil {
			broker.test.Fatalf("%s %s: %v in %s", method, path, err, said)
		}
	}
}

// WaitFor returns when a condition holds, such as {"until": "dead_letters", "group": "g"}. skipWaits: no delayed message waits
// meanwhile.
func (broker *Rocketlet) WaitFor(condition string, skipWaits bool) {
	broker.test.Helper()
	broker.Call("POST", "/wait-for", fmt.Sprintf(`{"condition": %s, "skip_waits": %t}`, condition, skipWaits), nil)
}

// Message is what is stored.
type Message struct {
	Text           string `json:"text"`
	MessageID      string `json:"message_id"`
	ReconsumeTimes int    `json:"reconsume_times"`
}

// Messages gives those of a topic, in the order of their storing.
func (broker *Rocketlet) Messages(topic string) []Message {
	broker.test.Helper()
	var found []Message
	broker.Call("GET", "/topics/"+topic+"/messages", "", &found)
	return found
}

// DeadLetters gives what a group has given up on.
func (broker *Rocketlet) DeadLetters(group string) []Message {
	broker.test.Helper()
	var found []Message
	broker.Call("GET", "/groups/"+group+"/dead-letters", "", &found)
	return found
}
