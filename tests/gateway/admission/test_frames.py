import asyncio
import socket

from gateway.admission.frames import Frames


async def test_messages_arrive_whole_and_in_order_and_the_end_is_told():
    one, other = socket.socketpair()
    received: list = []
    lost = asyncio.Event()
    sender, receiver = (
        Frames(lambda *parts: None, lambda: None),
        Frames(lambda *parts: received.append(parts), lost.set),
    )
    await sender.connect(one)
    await receiver.connect(other)
    sent = [("kind", number, "x" * 100_000) for number in range(20)]
    for message in sent:
        sender.send(*message)
    sender.close()
    await asyncio.wait_for(lost.wait(), 60)
    assert received == sent
    receiver.send("nobody reads this")
