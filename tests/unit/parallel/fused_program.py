"""The kernels of parallel/tensor/fused_kernels.py in Triton's interpreter: every program of every rank is a process.

    python -m tests.unit.parallel.fused_program gather|scatter RANKS ABREAST REPEATS SEED [TURNS [PLACES]]

Programs of a rank begin a product together and end it together, as kernels on one stream do; ranks run free. There are
PLACES for them, ABREAST where nothing is said, and the next begins when one has ended, as on a GPU. Memory is shared by
forking, at the same addresses. Ends with 0 where every result is right and every flag was put back.
"""

import multiprocessing
import os
import random
import sys
import time

os.environ["TRITON_INTERPRET"] = "1"

import torch

from shardline.parallel.tensor import fused_kernels
from shardline.parallel.tensor.fused import Division
from shardline.parallel.tensor.tile_order import gathering_shard

T, N, K = 32, 40, 24
GROUP = 2
TILES = {"BM": 16, "BN": 16, "BK": 16, "PRECISION": "ieee", "ON_GPU": False}
SECONDS = 60
ENDLESS = 1000  # turns
fork = multiprocessing.get_context("fork")


class Setting:
    """What all processes see."""

    def __init__(self, ranks: int, abreast: int, repeats: int, seed: int, turns: int, places: int) -> None:
        self.ranks, self.abreast, self.repeats, self.seed, self.turns = ranks, abreast, repeats, seed, turns
        self.programs = programs = self.count(T // TILES["BM"] * -(-N // TILES["BN"]), Division(abreast, turns))
        self.random = torch.Generator().manual_seed(seed)
        self.by_rows = seed % 2 == 0
        shape = (N, K) if self.by_rows else (K, N)
        self.weights = [self.drawn(*shape) for _ in range(ranks)]
        self.states = [self.zeros(fused_kernels.WORDS) for _ in range(ranks)]
        self.ends = [fork.Barrier(programs) for _ in range(ranks)]
        self.places = [fork.Semaphore(places or abreast) for _ in range(ranks)]

    def count(self, tiles: int, division: Division) -> int:
        """The programs of a rank; `tiles` are those of one rank's rows."""
        return division.programs(self.ranks * tiles)

    def drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).share_memory_()

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype).share_memory_()

    def right(self, rank: int) -> torch.Tensor:
        return self.weights[rank].t() if self.by_rows else self.weights[rank]

    def fixed(self) -> dict:
        return {
            **TILES,
            "RANKS": self.ranks,
            "ROWS": self.by_rows,
            "PIECES": 1 + self.seed % 2,
        }

    def delays(self, *numbers: int):
        late = random.Random(str((self.seed, *numbers)))
        return lambda: time.sleep(late.random() * 0.03)


class Gathering(Setting):
    def __init__(self, *arguments: int) -> None:
        super().__init__(*arguments)
        self.rows = self.drawn(self.repeats, self.ranks * T, K)
        unknown = torch.full((self.ranks, self.repeats, self.ranks * T, K), float("nan"))
        self.fulls = unknown.share_memory_()
        self.outs = self.zeros(self.ranks, self.repeats, self.ranks * T, N, dtype=torch.float32)
        self.flags = self.zeros(self.ranks, self.ranks)
        self.ends = [fork.Barrier(self.programs + 1) for _ in range(self.ranks)]

    def program(self, rank: int, program: int) -> None:
        for number in range(self.repeats):
            self.ends[rank].wait()
            mine = self.rows[number, rank * T : (rank + 1) * T].contiguous()
            with self.places[rank]:
                fused_kernels.gather_matmul[(1,)](
                    mine, self.fulls[rank, number], self.weights[rank], self.outs[rank, number], self.flags[rank],
                    self.states[rank], self.states[rank], T, N, K, rank, 1, GROUP, self.abreast, self.turns,
                    **self.fixed(),
                )  # fmt: skip
            self.ends[rank].wait()

    def engine(self, rank: int) -> None:
        """Copies the others' rows, in the order of their use, and sets flags."""
        late = self.delays(rank)
        for number in range(self.repeats):
            self.ends[rank].wait()
            time.sleep(1.5 if number == 0 else 0)  # long after the programs have come to the first tile that needs it
            for turn in range(1, self.ranks):
                late()
                source = gathering_shard(turn, rank, self.ranks)
                rows = slice(source * T, (source + 1) * T)
                self.fulls[rank, number, rows] = self.rows[number, rows]
                self.flags[rank, source] = 1
            self.ends[rank].wait()

    def processes(self) -> list:
        copying = [fork.Process(target=self.engine, args=(rank,)) for rank in range(self.ranks)]
        return copying + _programs(self)

    def check(self) -> None:
        for rank in range(self.ranks):
            torch.testing.assert_close(self.outs[rank], self.rows @ self.right(rank), rtol=1e-4, atol=1e-4)
        assert not self.flags.any()


class Scattering(Setting):
    def count(self, tiles: int, division: Division) -> int:
        return division.programs((self.ranks - 1) * tiles) + division.programs(tiles)

    def __init__(self, *arguments: int) -> None:
        super().__init__(*arguments)
        self.rows = [self.drawn(self.repeats, self.ranks * T, K) for _ in range(self.ranks)]
        self.outs = self.zeros(self.ranks, self.repeats, T, N, dtype=torch.float32)
        self.room, self.most = T * N + 16, T // TILES["BM"] * -(-N // TILES["BN"]) + 3
        self.parts = self.zeros(self.ranks, 2 * self.ranks * self.room, dtype=torch.float32)
        self.flags = self.zeros(self.ranks, 2 * self.ranks * self.most)
        self.tables = [torch.tensor([one.data_ptr() for one in memory]) for memory in (self.parts, self.flags)]

    def program(self, rank: int, program: int) -> None:
        late = self.delays(rank, program)
        for number in range(self.repeats):
            late()
            self.ends[rank].wait()
            with self.places[rank]:
                fused_kernels.matmul_scatter[(1,)](
                    self.rows[rank][number], self.weights[rank], self.outs[rank, number], *self.tables,
                    self.states[rank], self.states[rank], T, N, K, rank, self.room, self.most,
                    GROUP, self.abreast, self.turns, **self.fixed(),
                )  # fmt: skip
            self.ends[rank].wait()

    def processes(self) -> list:
        return _programs(self)

    def check(self) -> None:
        wanted = sum(rows @ self.right(rank) for rank, rows in enumerate(self.rows))
        for rank in range(self.ranks):
            own = wanted[:, rank * T : (rank + 1) * T]
            torch.testing.assert_close(self.outs[rank], own, rtol=1e-4, atol=1e-4)
        assert not self.flags.any()
        assert {tuple(state.tolist()) for state in self.states} == {(self.repeats % 2, 0, 0)}


def _programs(setting: Setting) -> list:
    pairs = [(rank, program) for rank in range(setting.ranks) for program in range(setting.programs)]
    return [fork.Process(target=setting.program, args=pair) for pair in pairs]


def main(kind: str, *numbers: str) -> None:
    torch.set_num_threads(1)
    given = [int(number) for number in numbers]
    setting = {"gather": Gathering, "scatter": Scattering}[kind](*given, *(ENDLESS, 0)[len(given) - 4 :])
    processes = setting.processes()
    for process in processes:
        process.start()
    deadline = time.monotonic() + SECONDS
    while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
        if time.monotonic() > deadline:
            sys.exit("a program hangs")
        time.sleep(0.01)
    codes = [process.exitcode for process in processes]
    if any(codes):
        sys.exit(f"exit codes {codes}")
    setting.check()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    finally:
        for child in multiprocessing.active_children():
            child.kill()
