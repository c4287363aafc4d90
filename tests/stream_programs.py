"""Programs of several streams, what runs them on a `SimulatedDevice`, and an oracle of what can happen."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from gpuarena.testing.streams import SimulatedDevice

N_BYTES = 4

# -- programs: lists of tuples, the first word says what the host does -----------------------------------------------
#   ("launch", stream, kernel, reads, writes)   reads and writes: sets of single bytes
#   ("record", stream, event)  ("wait", stream, event)
#   ("sync", stream)           stream None: the device
#   ("run", choices)           the device gets on


#: More launches than anything else, since a program shows nothing unless kernels meet.
WORDS = ("launch", "launch", "launch", "launch", "record", "record", "wait", "sync", "run")


@st.composite
def programs(draw, *, n_streams=4, max_ops=11, words=WORDS):
    """Draw a program; kernels and events are numbered in their order."""
    bytes_ = st.sampled_from([set(), {0}, {0}, {0, 1}, {1, 2, 3}])
    n_streams = draw(st.integers(2, n_streams))
    program, n_kernels, n_events = [], 0, 0
    for _ in range(draw(st.integers(max_ops // 2, max_ops))):
        word = draw(st.sampled_from(words))
        stream = draw(st.integers(0, n_streams - 1))
        if word == "launch":
            program.append((word, stream, n_kernels, draw(bytes_), draw(bytes_)))
            n_kernels += 1
        elif word == "record":
            program.append((word, stream, n_events))
            if draw(st.booleans()):  # most programs that are drawn at random order next to nothing
                program.append(("wait", draw(st.integers(0, n_streams - 1)), n_events))
            n_events += 1
        elif word == "wait" and n_events:
            program.append((word, stream, draw(st.integers(0, n_events - 1))))
        elif word == "sync":
            program.append((word, draw(st.sampled_from([None, stream]))))
        elif word == "run":
            program.append((word, draw(st.lists(st.integers(0, 5), max_size=3))))
    return program


class Oracle:
    """Which kernels can be done while which others are not, found by visiting all states.

    A state is how far the host is and how far each stream is. The host passes a synchronisation when the stream is
    done with all it was given; a stream passes a wait when the event's stream has passed the record.
    """

    def __init__(self, program):
        self.program = [op for op in program if op[0] != "run"]
        self.kernels = [op for op in program if op[0] == "launch"]
        streams = sorted({op[1] for op in self.program if op[1] is not None})
        queued = {s: [] for s in streams}  # (position in the program, operation)
        for position, op in enumerate(self.program):
            if op[0] in ("launch", "record", "wait"):
                queued[op[1]].append((position, op))
        self.before = set()  # (a, b): kernel a can be done while b is not
        start = (0, (0,) * len(streams))
        seen, todo = {start}, [start]
        while todo:
            host, progress = todo.pop()
            done_ops = [op for s, n in zip(streams, progress, strict=True) for _, op in queued[s][:n]]
            done = {op[2] for op in done_ops if op[0] == "launch"}
            recorded = {op[2] for op in done_ops if op[0] == "record"}
            self.before.update((a, b[2]) for a in done for b in self.kernels if b[2] not in done)
            nexts = []
            if host < len(self.program):
                op = self.program[host]
                waits_for = [] if op[0] != "sync" else streams if op[1] is None else [op[1]]
                if all(
                    progress[streams.index(s)] == sum(position < host for position, _ in queued[s])
                    for s in waits_for
                ):
                    nexts.append((host + 1, progress))
            for i, s in enumerate(streams):
                if progress[i] < len(queued[s]):
                    position, op = queued[s][progress[i]]
                    if position < host and (op[0] != "wait" or op[2] in recorded):
                        nexts.append((host, (*progress[:i], progress[i] + 1, *progress[i + 1 :])))
            for state in nexts:
                if state not in seen:
                    seen.add(state)
                    todo.append(state)

    def races(self):
        """Return pairs of kernels that can run in both orders and conflict."""
        return {
            (a[2], b[2])
            for a, b in itertools.combinations(self.kernels, 2)
            if {(a[2], b[2]), (b[2], a[2])} <= self.before and (a[4] & b[4] or a[4] & b[3] or a[3] & b[4])
        }

    def must_precede(self):
        """Return the pairs (a, b) of which b cannot be done while a is not."""
        numbers = [op[2] for op in self.kernels]
        return {(a, b) for a in numbers for b in numbers if a != b and (b, a) not in self.before}


class Run:
    """A program on a `SimulatedDevice`; each kernel mixes what it reads into what it writes."""

    def __init__(self, device=None):
        self.device = device or SimulatedDevice()
        self.streams = {}
        self.events = {}
        self.executed = []
        self.memory = [0] * N_BYTES

    def stream(self, number):
        if number not in self.streams:
            self.streams[number] = self.device.stream(str(number))
        return self.streams[number]

    def step(self, op):
        match op:
            case "launch", stream, kernel, reads, writes:
                self.launch(self.stream(stream), kernel, reads, writes)
            case "record", stream, event:
                self.events[event] = self.device.record(self.stream(stream))
            case "wait", stream, event:
                self.device.wait(self.stream(stream), self.events[event])
            case "sync", None:
                self.device.synchronize()
            case "sync", stream:
                self.device.synchronize(self.stream(stream))
            case "run", choices:
                self.device.run(choices)

    def launch(self, stream, kernel, reads, writes):
        def run():
            self.executed.append(kernel)
            value = hash((kernel, *(self.memory[i] for i in sorted(reads))))
            for i in writes:
                self.memory[i] = value

        self.device.launch(
            stream,
            reads=[(i, i + 1) for i in reads],
            writes=[(i, i + 1) for i in writes],
            run=run,
            name=str(kernel),
        )

    def all(self, program):
        for op in program:
            self.step(op)
        return self

    def races(self):
        return {(int(race.first.name), int(race.second.name)) for race in self.device.races}
