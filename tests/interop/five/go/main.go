// An unmodified official Go client of 5.x, driven by the tests: `peer MODE name=value...`. Prints what happens, a line each,
// and ends when stdin does.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	rmq "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
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

func config() *rmq.Config {
	found := &rmq.Config{
		Endpoint: get("endpoint", ""), ConsumerGroup: get("group", "g"), Credentials: &credentials.SessionCredentials{},
	}
	if access := get("access", ""); access != "" {
		found.Credentials = &credentials.SessionCredentials{AccessKey: access, AccessSecret: get("secret", "")}
	}
	return found
}

func filters() map[string]*rmq.FilterExpression {
	return map[string]*rmq.FilterExpression{get("topic", "t"): rmq.NewFilterExpression(get("tags", "*"))}
}

func text(value *string) string {
	if value == nil {
		return "-"
	}
	return *value
}

func got(view *rmq.MessageView) {
	keys := strings.Join(view.GetKeys(), ",")
	if keys == "" {
		keys = "-"
	}
	color := view.GetProperties()["farbe"]
	say("GOT %s %s %s %d %s %s", view.GetTopic(), text(view.GetTag()), keys, view.GetDeliveryAttempt(), view.GetBody(), color)
}

// isBad: the first time, or always.
func isBad(view *rmq.MessageView) bool {
	body := string(view.GetBody())
	return body == "worse" || body == "bad" && view.GetDeliveryAttempt() == 1
}

func message(body string) *rmq.Message {
	return &rmq.Message{Topic: get("topic", "t"), Body: []byte(body)}
}

func produce() {
	checker := &rmq.TransactionChecker{Check: func(view *rmq.MessageView) rmq.TransactionResolution {
		say("ASKED %s", view.GetBody())
		return rmq.COMMIT
	}}
	producer, err := rmq.NewProducer(config(), rmq.WithTopics(get("topic", "t")), rmq.WithTransactionChecker(checker))
	must(err)
	must(producer.Start())
	say("STARTED")
	send := func(sent *rmq.Message) *rmq.SendReceipt {
		receipts, err := producer.Send(context.Background(), sent)
		must(err)
		say("SENT %s %s", receipts[0].MessageID, sent.Body)
		return receipts[0]
	}
	for number := 0; number < 5; number++ {
		sent := message(fmt.Sprintf("normal-%d", number))
		sent.SetTag("TagA")
		sent.SetKeys(fmt.Sprintf("key-%d", number))
		sent.AddProperty("farbe", "grün")
		send(sent)
	}
	for number := 0; number < 5; number++ {
		sent := message(fmt.Sprintf("fifo-%d", number))
		sent.SetMessageGroup("mg")
		send(sent)
	}
	for _, body := range []string{"delayed", "recalled"} {
		sent := message(body)
		sent.SetDelayTimestamp(time.Now().Add(2 * time.Second))
		receipt := send(sent)
		if body == "recalled" {
			_, err := producer.Recall(context.Background(), get("topic", "t"), receipt.RecallHandle)
			must(err)
		}
	}
	for _, body := range []string{"committed", "rolled-back", "unknown"} {
		transaction := producer.BeginTransaction()
		_, err := producer.SendWithTransaction(context.Background(), message(body), transaction)
		must(err)
		switch body {
		case "committed":
			must(transaction.Commit())
		case "rolled-back":
			must(transaction.RollBack())
		}
	}
	say("DONE")
	waitForStdin()
	must(producer.GracefulStop())
}

// urgent sends messages with priorities, the least urgent first.
func urgent() {
	producer, err := rmq.NewProducer(config(), rmq.WithTopics(get("topic", "t")))
	must(err)
	must(producer.Start())
	for priority := int32(1); priority < 4; priority++ {
		sent := message(fmt.Sprintf("priority-%d", priority))
		must(sent.SetPriority(priority))
		_, err := producer.Send(context.Background(), sent)
		must(err)
	}
	say("DONE")
	waitForStdin()
	must(producer.GracefulStop())
}

func push() {
	consumer, err := rmq.NewPushConsumer(config(), rmq.WithPushAwaitDuration(5*time.Second),
		rmq.WithPushSubscriptionExpressions(filters()),
		rmq.WithPushMessageListener(&rmq.FuncMessageListener{Consume: func(view *rmq.MessageView) rmq.ConsumerResult {
			got(view)
			if isBad(view) {
				return rmq.FAILURE
			}
			return rmq.SUCCESS
		}}))
	must(err)
	must(consumer.Start())
	say("STARTED")
	waitForStdin()
	os.Exit(0) // it would wait for its long polls
}

func simple() {
	consumer, err := rmq.NewSimpleConsumer(config(), rmq.WithSimpleAwaitDuration(5*time.Second),
		rmq.WithSimpleSubscriptionExpressions(filters()))
	must(err)
	must(consumer.Start())
	say("STARTED")
	go func() {
		for {
			views, err := consumer.Receive(context.Background(), 16, 15*time.Second)
			var status *rmq.ErrRpcStatus
			if err != nil && !(errors.As(err, &status) && v2.Code(status.Code) == v2.Code_MESSAGE_NOT_FOUND) {
				must(err)
			}
			for _, view := range views {
				got(view)
				if isBad(view) {
					must(consumer.ChangeInvisibleDuration(view, time.Second))
				} else {
					must(consumer.Ack(context.Background(), view))
				}
			}
		}
	}()
	waitForStdin()
	os.Exit(0)
}

// lite does what each line of stdin says: `send NAME BODY`, `subscribe NAME`, `unsubscribe NAME`.
func lite() {
	consumer, err := rmq.NewLitePushConsumer(config(), rmq.NewLitePushConsumerConfig(get("topic", "t"), time.Minute),
		rmq.WithPushAwaitDuration(5*time.Second),
		rmq.WithPushMessageListener(&rmq.FuncMessageListener{Consume: func(view *rmq.MessageView) rmq.ConsumerResult {
			say("GOT %s %s - %d %s ", view.GetTopic(), view.GetLiteTopic(), view.GetDeliveryAttempt(), view.GetBody())
			if isBad(view) {
				return rmq.FAILURE
			}
			return rmq.SUCCESS
		}}))
	must(err)
	must(consumer.Start())
	producer, err := rmq.NewProducer(config(), rmq.WithTopics(get("topic", "t")))
	must(err)
	must(producer.Start())
	say("STARTED")
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		words := strings.Split(lines.Text(), " ")
		switch words[0] {
		case "send":
			sent := message(words[2])
			sent.SetLiteTopic(words[1])
			_, err = producer.Send(context.Background(), sent)
		case "subscribe":
			err = consumer.SubscribeLite(words[1])
		case "unsubscribe":
			err = consumer.UnSubscribeLite(words[1])
		default:
			err = errors.New(words[0])
		}
		if err != nil {
			say("REFUSED %T %v", err, err)
		} else {
			say("DID %s", lines.Text())
		}
	}
	os.Exit(0)
}

func main() {
	rmq.ResetLogger()
	for _, argument := range os.Args[2:] {
		name, value, _ := strings.Cut(argument, "=")
		options[name] = value
	}
	rmq.EnableSsl = get("tls", "") != ""
	map[string]func(){"produce": produce, "urgent": urgent, "push": push, "simple": simple, "lite": lite}[os.Args[1]]()
}
