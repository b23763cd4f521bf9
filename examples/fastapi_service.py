"""A FastAPI service that sends orders and consumes them: producer and consumer live as long as the application.

NAME_SERVER=127.0.0.1:9876 uvicorn fastapi_service:app
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request
from rocketlet import Consumer, Message, Producer, RocketletError


@asynccontextmanager
async def clients(app: FastAPI) -> AsyncIterator[None]:
    name_server = os.environ.get("NAME_SERVER", "127.0.0.1:9876")
    cooked: dict[str, str] = {}

    async def cook(message: Message) -> None:
        for number in message.keys:
            cooked[number] = message.body.decode()

    async with Producer(name_server, "shop") as producer, Consumer(name_server, "kitchen", "orders", cook):
        app.state.producer, app.state.cooked = producer, cooked
        yield


app = FastAPI(lifespan=clients)


@app.post("/orders/{number}", status_code=202)
async def order(number: str, dish: str, request: Request) -> dict[str, str]:
    """Send an order. The response is sent when the broker has stored it."""
    try:
        result = await request.app.state.producer.send("orders", dish.encode(), keys=number, queue_key=number)
    except RocketletError as error:
        raise HTTPException(503, str(error)) from error
    return {"message": result.message_id}


@app.get("/orders/{number}")
async def cooked(number: str, request: Request) -> dict[str, str]:
    found = request.app.state.cooked.get(number)
    if found is None:
        raise HTTPException(404, "not cooked yet")
    return {"dish": found}
