// Tests of a service that uses Apache's Go client, with Rocketlet: `go test ./...`. See docs/testing.md.
package shipping

import (
	"context"
	"strings"
	"sync"
	"testing"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

func init() {
	rlog.SetLogLevel("fatal")
}

func startProducer(t *testing.T, broker *Rocketlet) rocketmq.Producer {
	t.Helper()
	client, err := rocketmq.NewProducer(
		producer.WithNameServer([]string{broker.Address}), producer.WithGroupName("p-"+t.Name()), producer.WithRetry(2),
		producer.WithInstanceName("p-"+t.Name()))
	if err == nil {
		err = client.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Shutdown() })
	return client
}

func send(t *testing.T, client rocketmq.Producer, body string) {
	t.Helper()
	if _, err := client.SendSync(context.Background(), primitive.NewMessage("orders", []byte(body))); err != nil {
		t.Fatal(err)
	}
}

func TestAnOrderThatAlwaysFailsIsADeadLetterAfterSixteenRetries(t *testing.T) {
	broker := StartRocketlet(t)
	broker.Call("PUT", "/topics/orders", `{"queues": 1}`, nil)
	broker.Call("PUT", "/groups/shipping", "", nil)
	var lock sync.Mutex
	var tries []int32
	client, err := rocketmq.NewPushConsumer(
		consumer.WithNameServer([]string{broker.Address}), consumer.WithGroupName("shipping"),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset), consumer.WithInstance("c-"+t.Name()))
	if err != nil {
		t.Fatal(err)
	}
	err = client.Subscribe("orders", consumer.MessageSelector{},
		func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
			lock.Lock()
			defer lock.Unlock()
			for _, message := range messages {
				tries = append(tries, message.ReconsumeTimes)
			}
			return consumer.ConsumeRetryLater, nil
		})
	if err == nil {
		err = client.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Shutdown() })
	broker.WaitFor(`{"until": "asked", "name": "PULL_MESSAGE", "count": 2}`, false) // of the topic and the retry topic

	send(t, startProducer(t, broker), "poison")
	broker.WaitFor(`{"until": "dead_letters", "group": "shipping"}`, true) // 4 h 46 min of the broker's time

	lock.Lock()
	defer lock.Unlock()
	if len(tries) != 17 || tries[16] != 16 {
		t.Errorf("it was tried %v", tries)
	}
	if found := broker.DeadLetters("shipping"); len(found) != 1 || found[0].Text != "poison" {
		t.Errorf("the dead letters are %v", found)
	}
}

func TestABusyBrokerRefusesOnceAndTheServiceSendsAgain(t *testing.T) {
	broker := StartRocketlet(t)
	broker.Call("PUT", "/topics/orders", `{"queues": 1}`, nil)
	client := startProducer(t, broker)
	broker.Call("POST", "/faults", `[{"action": "answer", "code": "SEND_MESSAGE", "response": "SYSTEM_BUSY"}]`, nil)

	order := primitive.NewMessage("orders", []byte("A1"))
	if _, err := client.SendSync(context.Background(), order); err == nil || !strings.Contains(err.Error(), "CODE: 2") {
		t.Errorf("the client said %v", err)
	}
	send(t, client, "A1")

	if found := broker.Messages("orders"); len(found) != 1 || found[0].Text != "A1" {
		t.Errorf("stored are %v", found)
	}
}

func TestAMessageIsStoredButNotAcknowledgedSoItIsStoredTwice(t *testing.T) {
	broker := StartRocketlet(t)
	broker.Call("PUT", "/topics/orders", `{"queues": 1}`, nil)
	client := startProducer(t, broker)
	send(t, client, "before")
	broker.Call("POST", "/faults", `[{"action": "close_after", "code": "SEND_MESSAGE"}]`, nil)

	if _, err := client.SendSync(context.Background(), primitive.NewMessage("orders", []byte("twice"))); err != nil {
		send(t, client, "twice") // as a service does that was told nothing
	}

	if found := broker.Messages("orders"); len(found) != 3 || found[1].Text != "twice" || found[2].Text != "twice" {
		t.Errorf("stored are %v", found)
	}
}
