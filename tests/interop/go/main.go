// An unmodified Apache Go client, driven by the tests: `peer MODE name=value...`. Prints what happens, a line each, and
// ends when stdin does.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

var (
	options = map[string]string{}
	saying  sync.Mutex
)

func get(name, otherwise string) string {
	if value, ok := options[name]; ok {
		return value
	}
	return otherwise
}

// credentials sign the client's requests, if it has keys: access, secret.
func credentials() primitive.Credentials {
	return primitive.Credentials{AccessKey: get("access", ""), SecretKey: get("secret", "")}
}

func say(format string, values ...any) {
	saying.Lock()
	defer saying.Unlock()
	fmt.Printf(format+"\n", values...)
}

func must(err error) {
	if err != nil {
		say("FAILED %v", err)
		os.Exit(1)
	}
}

func waitForStdin() {
	_, _ = io.Copy(io.Discard, os.Stdin)
}

func main() {
	rlog.SetLogLevel("fatal")
	for _, argument := range os.Args[2:] {
		name, value, _ := strings.Cut(argument, "=")
		options[name] = value
	}
	switch os.Args[1] {
	case "produce":
		produce()
	case "transaction":
		transaction()
	case "consume":
		consume()
	default:
		say("FAILED no mode %s", os.Args[1])
	}
}

func started() rocketmq.Producer {
	client, err := rocketmq.NewProducer(
		producer.WithNameServer([]string{get("ns", "")}), producer.WithGroupName("go_producers"), producer.WithRetry(2),
		producer.WithCredentials(credentials()))
	must(err)
	must(client.Start())
	return client
}

func produce() {
	client := started()
	topic := get("topic", "")
	count, _ := strconv.Atoi(get("count", "10"))
	for number := 0; number < count; number++ {
		body := "go-" + strconv.Itoa(number)
		if number%2 == 1 {
			body += "-" + strings.Repeat("x", 5000)
		}
		message := primitive.NewMessage(topic, []byte(body)).WithTag("TagA").WithKeys([]string{"key-" + strconv.Itoa(number)})
		message.WithProperty("farbe", "grün")
		result, err := client.SendSync(context.Background(), message)
		must(err)
		say("SENT %d %s %s", result.Status, result.MsgID, result.OffsetMsgID)
	}
	batch := []*primitive.Message{}
	for number := 0; number < 5; number++ {
		batch = append(batch, primitive.NewMessage(topic, []byte("batch-"+strconv.Itoa(number))))
	}
	result, err := client.SendSync(context.Background(), batch...)
	must(err)
	say("BATCH %d %s", result.Status, result.OffsetMsgID)
	must(client.SendOneWay(context.Background(), primitive.NewMessage(topic, []byte("oneway"))))
	var done sync.WaitGroup
	done.Add(1)
	must(client.SendAsync(context.Background(), func(_ context.Context, result *primitive.SendResult, err error) {
		must(err)
		say("ASYNC %d", result.Status)
		done.Done()
	}, primitive.NewMessage(topic, []byte("async"))))
	done.Wait()
	delayed := primitive.NewMessage(topic, []byte("delayed"))
	delayed.WithDelayTimeLevel(1)
	_, err = client.SendSync(context.Background(), delayed)
	must(err)
	say("STARTED")
	waitForStdin()
	must(client.Shutdown())
}

type listener struct{}

func (listener) ExecuteLocalTransaction(*primitive.Message) primitive.LocalTransactionState {
	return state(get("outcome", "commit"))
}

func (listener) CheckLocalTransaction(message *primitive.MessageExt) primitive.LocalTransactionState {
	say("ASKED %s", string(message.Body))
	return state(get("check", "unknown"))
}

func state(name string) primitive.LocalTransactionState {
	switch name {
	case "commit":
		return primitive.CommitMessageState
	case "rollback":
		return primitive.RollbackMessageState
	}
	return primitive.UnknowState
}

func transaction() {
	client, err := rocketmq.NewTransactionProducer(listener{},
		producer.WithNameServer([]string{get("ns", "")}), producer.WithGroupName("go_transactions"),
		producer.WithCredentials(credentials()))
	must(err)
	must(client.Start())
	result, err := client.SendMessageInTransaction(context.Background(),
		primitive.NewMessage(get("topic", ""), []byte(get("body", ""))))
	must(err)
	say("SENT %d", result.Status)
	say("STARTED")
	waitForStdin()
	must(client.Shutdown())
}

func consume() {
	mode := get("mode", "concurrently")
	settings := []consumer.Option{
		consumer.WithNameServer([]string{get("ns", "")}),
		consumer.WithGroupName(get("group", "g")),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithConsumerOrder(mode == "orderly"),
		consumer.WithCredentials(credentials()),
	}
	if mode == "broadcast" {
		settings = append(settings, consumer.WithConsumerModel(consumer.BroadCasting))
	}
	client, err := rocketmq.NewPushConsumer(settings...)
	must(err)
	selector := consumer.MessageSelector{Type: consumer.TAG, Expression: get("tags", "*")}
	if expression, ok := options["sql"]; ok {
		selector = consumer.MessageSelector{Type: consumer.SQL92, Expression: expression}
	}
	handle := func(ctx context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		again := false
		for _, message := range messages {
			body := string(message.Body)
			if len(body) > 40 {
				body = body[:40]
			}
			say("GOT %s %d %d %d %s %d", message.Topic, message.Queue.QueueId, message.QueueOffset,
				message.ReconsumeTimes, body, time.Now().UnixMilli())
			again = again || mode == "fail-once" && message.ReconsumeTimes == 0
		}
		if again {
			if concurrent, ok := primitive.GetConcurrentlyCtx(ctx); ok {
				concurrent.DelayLevelWhenNextConsume = 1
			}
			return consumer.ConsumeRetryLater, nil
		}
		return consumer.ConsumeSuccess, nil
	}
	for _, topic := range strings.Split(get("topic", ""), ",") {
		must(client.Subscribe(topic, selector, handle))
	}
	must(client.Start())
	say("STARTED")
	waitForStdin()
	must(client.Shutdown())
}
