import ctypes
import resource

from kernels.heap import keep_freed_memory

SIZE, NUM_BLOCKS = 3 << 20, 5


def page_faults_of_a_step(libc: ctypes.CDLL) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    blocks = [libc.malloc(SIZE) for _ in range(NUM_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, SIZE)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_a_step_takes_the_memory_of_the_step_before() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    keep_freed_memory()
    # Not each of them: a small object may come to lie in what a large one has left, which is too small for it then.
    assert min(page_faults_of_a_step(libc) for _ in range(8)) < 100
