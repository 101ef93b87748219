"""`shardline trace hang`: compare the flight recorders of all ranks and find where they diverge.

It prints, for each group of ranks, the first collective that not all of them have completed:

    tp, ranks 0-3: all have done call 811, all_gather over tp of (4, 512) float32
      call 812, all_reduce over tp of (4, 512) float32, step 17
        waiting        ranks 0, 1, 3    since 14:02:11
        not arrived    rank 2           its last is call 811
"""

from __future__ import annotations

import json as json_lines
import re
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from shardline.comm.flight_recorder import Flight
from shardline.config.schema import Comm
from shardline.errors import UserError
from shardline.words import numbered

Members = tuple[int, ...]
STATES = ("waiting", "issued", "done", "other", "not arrived", "no file")


class FlightFile(BaseModel):
    """What one rank's flight recorder wrote."""

    rank: int
    host: str
    pid: int
    reason: str
    at: float
    members: dict[str, Members]
    collectives: list[tuple[str, int, str, int, int, float, float, float]]

    def flights(self) -> dict[str, dict[int, Flight]]:
        """Return the collectives by axis and number."""
        found: dict[str, dict[int, Flight]] = {}
        for row in self.collectives:
            found.setdefault(row[0], {})[row[1]] = Flight(*row)
        return found


@dataclass(frozen=True)
class Parting:
    """The first collective of a group that not all of its ranks have completed; `ranks` groups them by state."""

    axis: str
    members: Members
    number: int
    tag: str
    step: int
    since: float  # when the first rank issued it
    ranks: dict[str, list[int]]  # by state, see STATES
    others: dict[int, str]  # ranks that did another collective under the same number
    done_by_all: int  # number of the last one that all have completed; 0 if unknown


def command(run: str, json: bool = False) -> int:
    files = read_files(Path(run))
    found = sorted(partings(files), key=lambda one: one.since)
    if json:
        for one in found:
            print(json_lines.dumps(asdict(one)))
        return 0
    for reason in dict.fromkeys(file.reason for file in files.values()):
        print(f"{numbered('rank', [rank for rank, file in files.items() if file.reason == reason])}: {reason}")
    for one in found:
        print("\n".join(["", *lines(one, files)]))
    if not found:
        print("every issued collective is done on all ranks that wrote a file")
    return 0


def _traces_folder(run: Path) -> str:
    """Return `comm.save_traces_folder` from the config in the run folder."""
    try:
        return str(tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))["comm"]["save_traces_folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return Comm().save_traces_folder


def read_files(path: Path) -> dict[int, FlightFile]:
    """Return the recorders' files in a folder or in a run, by rank."""
    inside = path / _traces_folder(path)
    folder = inside if inside.is_dir() else path
    files = [found for found in sorted(folder.glob("*.json")) if re.search(r"\d+\.json$", found.name)]
    if not files:
        raise UserError(
            f"{path} holds no flight recorder files: a hang writes them to the run's comm.save_traces_folder,"
            " and so does SIGUSR2 to its launcher or to a rank"
        )
    read: dict[int, FlightFile] = {}
    for found in files:
        try:
            file = FlightFile.model_validate_json(found.read_bytes())
        except (ValidationError, OSError) as error:
            raise UserError(f"{found} is not a flight recorder file: {str(error).splitlines()[0]}") from error
        read[file.rank] = file
    return read


def partings(files: Mapping[int, FlightFile]) -> Iterator[Parting]:
    """Yield one for each group of ranks with a collective that is not done on all of them."""
    flights = {rank: file.flights() for rank, file in files.items()}
    groups = {(axis, members) for file in files.values() for axis, members in file.members.items()}
    groups |= {(axis, tuple(sorted(files))) for of in flights.values() for axis in of if not _known(axis, groups)}
    for axis, members in sorted(groups):
        of = {rank: flights[rank].get(axis, {}) for rank in members if rank in files}
        open_ones = [number for calls in of.values() for number, call in calls.items() if not call.done]
        behind = [max(calls, default=0) + 1 for calls in of.values()]  # each rank's next collective
        furthest = max((max(calls, default=0) for calls in of.values()), default=0)
        number = min([*open_ones, *(one for one in behind if one <= furthest)], default=0)
        if number:
            yield _parting(axis, members, number, of)


def _known(axis: str, groups: set[tuple[str, Members]]) -> bool:
    return any(name == axis for name, _ in groups)


def _parting(axis: str, members: Members, number: int, of: Mapping[int, Mapping[int, Flight]]) -> Parting:
    here = {rank: calls[number] for rank, calls in of.items() if number in calls}
    first = min(here.values(), key=lambda call: call.issued)
    ranks: dict[str, list[int]] = {state: [] for state in STATES}
    for rank in members:
        ranks[_state(rank, number, first.tag, of)].append(rank)
    others = {rank: here[rank].tag for rank in ranks["other"]}
    done = [number - 1] if all(calls and max(calls) >= number - 1 for calls in of.values()) else [0]
    reached = {state: found for state, found in ranks.items() if found}
    return Parting(axis, members, number, first.tag, first.step, first.issued, reached, others, done[0])


def _state(rank: int, number: int, tag: str, of: Mapping[int, Mapping[int, Flight]]) -> str:
    if rank not in of:
        return "no file"
    call = of[rank].get(number)
    if call is None:
        return "not arrived"
    if call.tag != tag:
        return "other"
    return "done" if call.done else "waiting" if call.waited else "issued"


def lines(one: Parting, files: Mapping[int, FlightFile]) -> Iterator[str]:
    """Yield the text of a parting, as shown at the top of this file."""
    of = f"{one.axis}, {numbered('rank', one.members)}"
    yield f"{of}: all have done call {one.done_by_all}" if one.done_by_all else of
    yield f"  call {one.number}, {one.tag}, step {one.step}, issued {_clock(one.since)}"
    width = max(map(len, STATES))
    for state, ranks in one.ranks.items():
        yield f"    {state:{width}}  {numbered('rank', ranks)}{_more(one, state, ranks, files)}"


def _more(one: Parting, state: str, ranks: Sequence[int], files: Mapping[int, FlightFile]) -> str:
    if state == "other":
        return f": {one.others[ranks[0]]}"
    if state == "not arrived":
        last = files[ranks[0]].collectives[-1:]
        return f"; the last collective of rank {ranks[0]} is {last[0][2]} (call {last[0][1]})" if last else ""
    return ""


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
