"""What the workers of `test_worker` hold, without torch: it takes a second to import."""

import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any


class Thing:
    """What the workers of these specifications hold."""

    def __init__(self, value: Any = 0, fails: bool = False) -> None:
        if fails:
            raise RuntimeError("no such thing")
        self.value = value

    def set(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value

    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def pid(self) -> int:
        return os.getpid()

    def works(self, seconds: float) -> None:
        """In a thread, which goes on when the call is over."""
        end = time.process_time() + seconds

        def work() -> None:
            while time.process_time() < end:
                pass

        threading.Thread(target=work).start()

    def raises(self, message: str) -> None:
        raise ValueError(message)

    def prints(self, text: str) -> str:
        print(text)
        os.write(1, b"written past Python\n")
        print(text, file=sys.stderr)
        return text

    def answers(self, text: str) -> None:
        """Past the protocol, as a hostile candidate would."""
        import gc

        (connection,) = (thing for thing in gc.get_objects() if type(thing) is Connection)
        connection.send_bytes(sys._getframe(2).f_locals["token"] + text.encode())

    def sleeps(self, seconds: float) -> None:
        time.sleep(seconds)

    def dies(self, how: str) -> None:
        print(f"last words before {how}")
        {"exit": lambda: os._exit(7), "abort": os.abort, "leave": sys.exit}[how]()
