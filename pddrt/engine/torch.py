"""TorchEngine: steps of a real model over a pool of KV slots.

Owns the pool, and one worker thread in which its steps run, so that the event loop stays free. The
model is not owned: it holds no state of a step, and engines may share it
(`pddrt.engine.attention`).

- **Wall clock**: a step runs on the worker, with `threads` threads of its own. Torch keeps that
  number per thread, but a new thread starts with the number set last anywhere: the worker sets its
  own. A `step_cost` is then a lower bound on the step's time.
- **Virtual clock**: no thread. The charge is slept first and the step computed at its end, so that
  KV read too early is seen to be missing.
- A step that has begun runs to its end, also when its caller is cancelled: only then may the slots
  it writes go to somebody else. (Under the virtual clock, one cancelled while it sleeps has not
  begun.)
- A step that raises leaves the engine usable; what it has written is undefined.
- `read_kv` and `write_kv` run in the caller's thread while a step may be running: the caller keeps
  the slots apart.

A device that is not there, or that has no room for the pool, is `CannotRun`. Memory that runs out
later, in a step or in moving KV, is `EngineFailed`: it concerns what was in that step, and the next
one may fit. Senseless spans are assertions.

Measured: SmolLM2-135M in bfloat16, one core of an EPYC 9005, torch 2.13, contexts near 1,000,
medians; beside it transformers' own step over a DynamicCache with its sdpa attention, and the
linear layers alone (ms; a chunk is 512 tokens after 0):

                 ours    transformers    linear layers
    decode, 1    29.8            51.7             20.3
    decode, 4    39.9           130.5             20.6
    decode, 8    56.4           247.2             22.9
    chunk         348             528              241

A second core takes a chunk from 365 to 300 ms (542 to 392 with 1,024 tokens before it) and gains
nothing for decodes: 32 and 61 ms.
`read_kv` 24 and `write_kv` 31 GB/s (1,000 tokens in one run), 12 and 16 GB/s (in runs of 16).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from pddrt.engine.attention import ATTENTION, Kind, StepContext
from pddrt.engine.base import StepCost
from pddrt.engine.sampling import draw, log_probabilities
from pddrt.env import Env
from pddrt.errors import CannotRun, EngineFailed
from pddrt.types import DTYPE_BYTES, EIGHT_BIT, SCALE_BYTES, Drawn, KVLayout, Run, Sampling, Span


def _keep_freed_memory() -> None:
    """Tells glibc to keep what torch frees between the layers of a step, instead of unmapping it.

    Without this a chunk of 512 tokens of SmolLM2-135M takes 70,000 page faults; with it, none, and
    338 instead of 465 ms (715 -> 480 ms with 1,024 tokens before it). Other C libraries do without.
    """
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 256 << 20)


_keep_freed_memory()

STEP_NICE = 10

UNSUPPORTED = ("sliding_window", "attn_logit_softcapping", "attention_chunk_size")


def _device(name: str) -> torch.device:
    """The torch device called `name` (cpu, cuda, cuda:N); CannotRun where it is not there."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CannotRun(f"device {name} is not there: {str(error).splitlines()[0]}") from error
    if device.type not in ("cpu", "cuda"):
        raise CannotRun(f"device {name} is not supported; there are cpu and cuda:N")
    return device


def out_of_memory(error: BaseException) -> bool:
    """Torch has a class for its CUDA allocator only; its CPU allocator, and the libraries that take
    memory by themselves, raise a plain RuntimeError.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in SAID)


SAID = ("can't allocate memory", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")
"""What plain errors say: torch on the CPU, the driver, cuBLAS and cuDNN."""


P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate["TorchEngine", P], T]


def _within_memory(method: Method[P, T]) -> Method[P, T]:
    """`method`, where memory that runs out is EngineFailed, with what the device says of it.

    It is raised outside of the handler: a torch error that hung on to it would keep the frames of
    the failed step alive, and with them the memory that the next step needs.
    """

    @wraps(method)
    def guarded(engine: TorchEngine, /, *args: P.args, **more: P.kwargs) -> T:
        try:
            return method(engine, *args, **more)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            told = str(error).partition("\n")[0] or "no more is to be had"
        raise EngineFailed(f"out of memory on {engine._device} ({told})")

    return guarded


def _step_aside() -> None:
    """Lets the event loop's thread go first where cores are short: it needs little, but on time.

    A nice value is a thread's own on Linux, and OpenMP's threads inherit it.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), STEP_NICE)


class TorchEngine:
    """`Engine` (see `pddrt.engine.base`) on a transformers causal language model.

    `module` is in the layout's dtype and on `device`; its attention implementation is set to ours.
    `threads`: intra-op threads of a step. `step_cost` is required under the virtual clock.
    `attention` picks the kernel for short spans; None picks what was measured to be fastest for
    device and dtype.
    """

    def __init__(
        self,
        module: Any,
        layout: KVLayout,
        num_slots: int,
        env: Env,
        *,
        max_context: int,
        device: str = "cpu",
        threads: int = 1,
        step_cost: StepCost | None = None,
        name: str = "engine",
        attention: Kind | None = None,
    ) -> None:
        assert step_cost is not None or not env.virtual, "the virtual clock needs a step cost"
        self.layout = layout
        self.num_slots = num_slots
        self.max_context = max_context
        self.gathers = 0
        """Blocks whose KV lay in too many runs and was copied together first, over all steps."""

        self._device = _device(device)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        assert module.dtype == dtype, f"module is {module.dtype}, layout says {layout.dtype}"
        assert module.device.type == self._device.type, (
            f"module is on {module.device}, not on {device}"
        )
        config = module.config
        unlike = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        unlike |= {field for field in UNSUPPORTED if getattr(config, field, None)}
        if unlike:
            raise CannotRun(
                f"{config.model_type} with {', '.join(sorted(unlike))} is not supported"
            )
        if config._attn_implementation != ATTENTION:
            module.set_attn_implementation(ATTENTION)
        self._module = module
        self._heads: int = config.num_attention_heads
        self._kind: Kind = attention or self._fastest()
        shape = (layout.layers, 2, num_slots, layout.kv_heads, layout.head_dim)
        try:
            self._pool = torch.zeros(shape, dtype=dtype, device=self._device)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # before any step's own stream writes into it
        except (MemoryError, RuntimeError) as error:
            gib = num_slots * layout.bytes_per_token / 2**30
            raise CannotRun(f"no memory for a KV pool of {gib:.1f} GiB on {device}") from error
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        # The pool as bytes, [layer, k/v, slot, bytes of a token]: numpy has no bfloat16.
        self._bytes: np.ndarray[Any, Any] | None = None
        if self._stream is None:
            self._bytes = self._pool.view(torch.uint8).view(*shape[:3], -1).numpy()

        self._env = env
        self._threads = threads
        self._step_cost = step_cost
        self._worker = (
            None
            if env.virtual
            else ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_step_aside)
        )
        self._stepping = False
        self._closed = False

    def _fastest(self) -> Kind:
        if self._device.type == "cuda":
            return "padded"
        # Zeros in the other heads' places are arithmetic too: with many KV heads they cost more
        # than they save.
        narrow = DTYPE_BYTES[self.layout.dtype] == 2 and self.layout.kv_heads <= 8
        return "block-diagonal" if narrow else "rows"

    # -- steps -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """See `Engine.start`. A thread's first pass loads what torch loads late, some 0.2 s with
        the interpreter locked; they belong to no request. Nothing of it stays in the pool.
        Raises CannotRun where not even that fits into memory.
        """
        if self._worker is not None:
            slot = Run(0, 1)
            spans = [Span("warm-up", (0,), 0, (slot,), Sampling())]
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._worker, self._compute, spans)
            except EngineFailed as error:
                raise CannotRun(f"not even one token can be computed: {error}") from None
            self.write_kv([slot], bytes(self.layout.bytes_per_token))

    async def step(self, spans: Sequence[Span]) -> list[Drawn | None]:
        """See `Engine.step`. Raises EngineFailed where the step does not fit into memory."""
        assert not self._stepping, "an engine runs one step at a time"
        assert not self._closed, "the engine is closed"
        self._check(spans)
        self._stepping = True
        try:
            if self._worker is None:
                assert self._step_cost is not None
                await self._env.sleep_until(self._env.now() + self._step_cost(spans))
                return self._compute(spans)
            started = self._env.now()
            loop = asyncio.get_running_loop()
            computing = loop.run_in_executor(self._worker, self._compute, spans)
            cancelled: asyncio.CancelledError | None = None
            while not computing.done():
                try:
                    await asyncio.wait([computing])
                except asyncio.CancelledError as request:
                    cancelled = request
            if cancelled is not None:
                computing.exception()  # its failure, if any, has nobody left to go to
                raise cancelled
            drawn = computing.result()
            if self._step_cost is not None:
                due = started + self._step_cost(spans)
                if due > self._env.now():
                    await self._env.sleep_until(due)
            return drawn
        finally:
            self._stepping = False

    def _check(self, spans: Sequence[Span]) -> None:
        assert spans, "a step without spans"
        for span in spans:
            assert span.tokens, f"{span.request}: no tokens"
            assert 0 <= span.start < span.end <= self.max_context, (
                f"{span.request}: position {span.end}"
            )
            assert sum(run.length for run in span.runs) == span.end, f"{span.request}: runs"
            self._check_runs(span.runs)

    def _check_runs(self, runs: Sequence[Run]) -> None:
        for run in runs:
            assert run.slot >= 0, f"{run} is out of range"
            assert 0 < run.length <= self.num_slots - run.slot, f"{run} is out of range"

    @_within_memory
    def _compute(self, spans: Sequence[Span]) -> list[Drawn | None]:
        """The step itself, in whichever thread; KV is complete when it returns."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            if self._stream is None:
                return self._forward(spans)
            with torch.cuda.stream(self._stream):
                drawn = self._forward(spans)
            self._stream.synchronize()
            return drawn

    def _forward(self, spans: Sequence[Span]) -> list[Drawn | None]:
        tokens = [token for span in spans for token in span.tokens]
        positions = [position for span in spans for position in range(span.start, span.end)]
        context = StepContext(self._pool, spans, self._heads, self._kind)
        self.gathers += context.gathers
        last_rows, at = [], 0
        for span in spans:
            at += len(span.tokens)
            if span.sampling is not None:
                last_rows.append(at - 1)
        batch = torch.tensor([tokens, positions, last_rows + [0] * (at - len(last_rows))])
        batch = batch.to(self._device)
        output = self._module(
            input_ids=batch[0:1],
            position_ids=batch[1:2],
            use_cache=False,
            logits_to_keep=batch[2, : len(last_rows)],
            pddrt_step=context,
        )
        return self._sample(spans, output.logits[0])

    def _sample(self, spans: Sequence[Span], logits: torch.Tensor) -> list[Drawn | None]:
        """`logits` [spans that want an id, vocabulary]. Greedy ids are picked on the device; only
        rows that need more come to the host.
        """
        drawn: list[Drawn | None] = []
        row = 0
        greedy: list[int] | None = None
        for span in spans:
            if (sampling := span.sampling) is None:
                drawn.append(None)
                continue
            if sampling.temperature == 0 and not span.banned and sampling.logprobs is None:
                if greedy is None:
                    greedy = logits.argmax(-1).tolist()
                drawn.append(Drawn(greedy[row]))
            else:
                scores = logits[row].to("cpu", torch.float64).numpy()
                token = draw(scores, sampling, span.end, span.banned)
                most = sampling.logprobs
                told = None if most is None else log_probabilities(scores, token, most)
                drawn.append(Drawn(token, told))
            row += 1
        return drawn

    # -- KV ----------------------------------------------------------------------------------------

    @_within_memory
    def read_kv(self, runs: Sequence[Run]) -> bytes:
        """See `Engine.read_kv`."""
        self._check_runs(runs)
        if not runs:
            return b""
        if self._bytes is None:
            parts = [self._pool[:, :, run.slot : run.slot + run.length] for run in runs]
            return torch.cat(parts, 2).cpu().view(torch.uint8).numpy().tobytes()
        # join copies each segment once, straight into the result, without the GIL if it is large.
        segments = [
            half[run.slot : run.slot + run.length]
            for layer in self._bytes
            for half in layer
            for run in runs
        ]
        return b"".join(segments)

    @_within_memory
    def write_kv(self, runs: Sequence[Run], payload: bytes | memoryview) -> None:
        """See `Engine.write_kv`. `payload` may be read-only and unaligned; it is not kept."""
        self._check_runs(runs)
        tokens = sum(run.length for run in runs)
        size = memoryview(payload).nbytes
        assert size == tokens * self.layout.bytes_per_token, "payload and runs differ in size"
        if not runs:
            return
        source = np.frombuffer(payload, np.uint8)
        if self._bytes is None:
            shape = (self.layout.layers, 2, tokens, self.layout.kv_heads, self.layout.head_dim)
            staged = torch.empty(shape, dtype=self._pool.dtype, pin_memory=True)
            staged.view(torch.uint8).view(-1).numpy()[:] = source
            at = 0
            for run in runs:
                target = self._pool[:, :, run.slot : run.slot + run.length]
                target.copy_(staged[:, :, at : at + run.length])
                at += run.length
            # A later step runs on another stream, and must find this done.
            torch.cuda.current_stream(self._device).synchronize()
            return
        source = source.reshape(self.layout.layers, 2, tokens, -1)
        at = 0
        for run in runs:
            self._bytes[:, :, run.slot : run.slot + run.length] = source[:, :, at : at + run.length]
            at += run.length

    @_within_memory
    def convert_kv(self, payload: bytes | memoryview, dtype: str) -> bytes:
        """See `Engine.convert_kv`. On the CPU, wherever the pool is."""
        if dtype == EIGHT_BIT:
            return self._unpack_kv(payload)
        numbers = torch.frombuffer(bytearray(payload), dtype=getattr(torch, dtype))
        return numbers.to(self._pool.dtype).view(torch.uint8).numpy().tobytes()

    @_within_memory
    def pack_kv(self, payload: bytes) -> bytes:
        """See `Engine.pack_kv`. On the CPU, in float32."""
        if not payload:
            return b""
        heads = torch.frombuffer(bytearray(payload), dtype=self._pool.dtype).to(torch.float32)
        heads = heads.view(-1, self.layout.head_dim)
        scales = heads.abs().amax(-1, keepdim=True) / 127
        packed = torch.empty(len(heads), SCALE_BYTES + self.layout.head_dim, dtype=torch.int8)
        packed[:, :SCALE_BYTES] = scales.view(torch.int8)
        # Where all is 0, so is the scale, and 0 / 0 must be 0.
        heads /= scales.clamp_min(torch.finfo(torch.float32).tiny)
        packed[:, SCALE_BYTES:] = heads.round_().clamp_(-127, 127)
        return packed.numpy().tobytes()

    def _unpack_kv(self, payload: bytes | memoryview) -> bytes:
        packed = torch.frombuffer(bytearray(payload), dtype=torch.int8)
        packed = packed.view(-1, SCALE_BYTES + self.layout.head_dim)
        scales = packed[:, :SCALE_BYTES].contiguous().view(torch.float32)
        heads = packed[:, SCALE_BYTES:].to(torch.float32) * scales
        return heads.to(self._pool.dtype).view(torch.uint8).numpy().tobytes()

    async def close(self) -> None:
        """See `Engine.close`. Waits for a step in flight."""
        self._closed = True
        if self._worker is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._worker.shutdown)
            self._worker = None
        self._bytes = None
        self._pool = torch.empty(0)
