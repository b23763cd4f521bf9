// An unmodified official Rust client of 5.x, driven by the tests: `peer MODE name=value...`. Prints what happens, a line each,
// and ends when stdin does. Version 5.0.0 has no push consumer, recalls nothing, and changes no invisible time.

use std::collections::HashMap;
use std::io::Read;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rocketmq::conf::{ClientOption, ProducerOption, SimpleConsumerOption};
use rocketmq::model::common::{FilterExpression, FilterType};
use rocketmq::model::message::{MessageBuilder, MessageView};
use rocketmq::model::transaction::{Transaction, TransactionResolution};
use rocketmq::{Producer, SimpleConsumer};

type Options = HashMap<String, String>;

fn get(options: &Options, name: &str, otherwise: &str) -> String {
    options.get(name).cloned().unwrap_or_else(|| otherwise.to_string())
}

fn must<T, E: std::fmt::Debug>(result: Result<T, E>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => {
            println!("FAILED {}", format!("{error:?}").replace('\n', " "));
            std::process::exit(1);
        }
    }
}

async fn wait_for_stdin() {
    must(tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await).unwrap();
}

fn client(options: &Options) -> ClientOption {
    let mut found = ClientOption::default();
    found.set_access_url(get(options, "endpoint", ""));
    found.set_enable_tls(false);
    if let Some(access) = options.get("access") {
        found.set_access_key(access.clone());
        found.set_secret_key(get(options, "secret", ""));
    }
    found
}

fn body(message: &MessageView) -> String {
    String::from_utf8_lossy(message.body()).to_string()
}

async fn produce(options: &Options) {
    let topic = get(options, "topic", "t");
    let mut settings = ProducerOption::default();
    settings.set_topics(vec![topic.clone()]);
    let mut producer = must(Producer::new_transaction_producer(
        settings,
        client(options),
        Box::new(|_, message| {
            println!("ASKED {}", body(&message));
            TransactionResolution::COMMIT
        }),
    ));
    must(producer.start().await);
    println!("STARTED");
    for number in 0..5 {
        let message = MessageBuilder::builder()
            .set_topic(topic.clone())
            .set_tag("TagA")
            .set_keys(vec![format!("key-{number}")])
            .set_properties(HashMap::from([("farbe", "grün")]))
            .set_body(format!("normal-{number}").into_bytes());
        println!("SENT {}", must(producer.send(must(message.build())).await).message_id());
    }
    for number in 0..5 {
        let message = MessageBuilder::fifo_message_builder(topic.clone(), format!("fifo-{number}").into_bytes(), "mg");
        println!("SENT {}", must(producer.send(must(message.build())).await).message_id());
    }
    let due = must(SystemTime::now().duration_since(UNIX_EPOCH)).as_secs() as i64 + 2;
    let message = MessageBuilder::delay_message_builder(topic.clone(), b"delayed".to_vec(), due);
    println!("SENT {}", must(producer.send(must(message.build())).await).message_id());
    for text in ["committed", "rolled-back", "unknown"] {
        let message = MessageBuilder::transaction_message_builder(topic.clone(), text.as_bytes().to_vec());
        let transaction = must(producer.send_transaction_message(must(message.build())).await);
        match text {
            "committed" => must(transaction.commit().await),
            "rolled-back" => must(transaction.rollback().await),
            _ => {}
        }
    }
    println!("DONE");
    wait_for_stdin().await;
    must(producer.shutdown().await);
}

fn got(message: &MessageView) {
    let (keys, nothing) = (message.keys().join(","), String::new());
    println!(
        "GOT {} {} {} {} {} {}",
        message.topic(),
        message.tag().unwrap_or("-"),
        if keys.is_empty() { "-" } else { &keys },
        message.delivery_attempt(),
        body(message),
        message.properties().get("farbe").unwrap_or(&nothing),
    );
}

async fn simple(options: &Options) {
    let (topic, tags) = (get(options, "topic", "t"), get(options, "tags", "*"));
    let mut settings = SimpleConsumerOption::default();
    settings.set_topics(vec![topic.clone()]);
    settings.set_consumer_group(get(options, "group", "g"));
    let mut waits = client(options);
    waits.set_long_polling_timeout(Duration::from_secs(5));
    let mut consumer = must(SimpleConsumer::new(settings, waits));
    must(consumer.start().await);
    println!("STARTED");
    let filter = FilterExpression::new(FilterType::Tag, tags);
    let receiving = async {
        loop {
            let messages = consumer.receive_with(topic.clone(), &filter, 16, Duration::from_secs(10)).await;
            for message in must(messages) {
                got(&message);
                if body(&message) != "bad" || message.delivery_attempt() > 1 {
                    must(consumer.ack(&message).await);
                }
            }
        }
    };
    tokio::select! {
        _ = wait_for_stdin() => std::process::exit(0),
        _ = receiving => {}
    }
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let options: Options = arguments[2..]
        .iter()
        .filter_map(|argument| argument.split_once('='))
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect();
    match arguments[1].as_str() {
        "produce" => produce(&options).await,
        _ => simple(&options).await,
    }
}
