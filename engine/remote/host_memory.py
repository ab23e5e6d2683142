"""Memory that processes of one machine share."""

import mmap
import os
from typing import Self


class HostMemory:
    """A file without a name, mapped: when the last process that holds it ends, however it ends, nothing is left behind.

    Made by one process, all zero; `address` opens it in others for as long as the maker lives and has not closed it.
    """

    def __init__(self, descriptor: int, num_bytes: int, maker: int) -> None:
        """maker: the process that made it."""
        self.mapped = mmap.mmap(descriptor, num_bytes)
        self.maker = maker
        self._descriptor = -1

    @classmethod
    def create(cls, num_bytes: int) -> Self:
        descriptor = os.memfd_create("nanoserve")
        os.ftruncate(descriptor, num_bytes)
        memory = cls(descriptor, num_bytes, os.getpid())
        memory._descriptor = descriptor
        return memory

    @classmethod
    def open(cls, address: str, num_bytes: int) -> Self:
        """Raises `OSError` if its maker is gone or runs on another machine."""
        pid, descriptor = map(int, address.split(":"))
        file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        try:
            return cls(file, num_bytes, pid)
        finally:
            os.close(file)

    @property
    def address(self) -> str:
        return f"{self.maker}:{self._descriptor}"

    def close(self) -> None:
        """Let nobody else open it; idempotent. Who holds the memory keeps it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
