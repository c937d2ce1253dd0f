"""A TCP proxy that misbehaves as networks do: it delays, loses, cuts and goes silent."""

import asyncio
import contextlib
import random
import threading


class Proxy:
    """Forwards a loopback port to a server's; a context manager.

    Attributes:
        delay_s: of everything on its way, each direction.
        loss: probability that a piece waits as long as a lost packet does until it is sent again.
        is_silent: nothing passes, nobody is told.
    """

    RETRANSMISSION_S = 0.2

    def __init__(self, target: int, rng: random.Random) -> None:
        self._target, self._rng = target, random.Random(rng.random())
        self.delay_s = self.loss = 0.0
        self.is_silent = False
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def cut(self) -> None:
        """Reset every connection and take no new one until `mend`."""
        self._is_cut = True
        self._loop.call_soon_threadsafe(self._reset)

    def mend(self) -> None:
        """Let everything pass again; connections that were silent go on, those that were cut come anew."""
        self._is_cut = self.is_silent = False

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        self._reset()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        with contextlib.suppress(OSError):
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers |= {writer, other_writer}
            pipes = self._pipe(reader, other_writer), self._pipe(other_reader, writer)
            await asyncio.gather(*pipes, return_exceptions=True)
            self._writers -= {writer, other_writer}
        writer.transport.abort()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                while self.is_silent:
                    await asyncio.sleep(0.05)
                lost = self._rng.random() < self.loss
                await asyncio.sleep(self.delay_s + lost * self.RETRANSMISSION_S)
                writer.write(data)
                await writer.drain()
        finally:
            writer.transport.abort()
