"""Traces as ``torch.profiler`` writes them (Kineto's layout, odd blanks included), made by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASE_NS = 1790857026000000000
"""What Kineto takes as time 0, in Unix nanoseconds."""
START_US = 5175728979697.235
"""Where the made-up traces begin, in microseconds after it; Unix second 1796032754.979697235."""
HOST, THREAD = 7371, 7371
LLAMA_DECODE = (
    ("nvjet_sm90_tst_128x16_64x11_2x1_v_bz_TNT", 50.0),
    ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>(...)", 25.0),
    ("triton_red_fused_fused_add_rms_norm_2", 2.0),
)
HEAD = """ {
    "schemaVersion": 1,
    "deviceProperties": [
    {
      "id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150119743488,
      "computeMajor": 9, "computeMinor": 0, "numSms": 132
    }
  ],
    "cupti_version": 26,
    "cuda_runtime_version": 12080,
      "trace_id": "EC728169D1EB43AA89C4785B4A0964CF",
      "host_name": "host",
    "displayTimeUnit": "ms",
    "baseTimeNanoseconds": 1790857026000000000,
    "traceEvents": [

"""
TAIL = """
  ],"traceName": "trace.json" }"""


@dataclass
class MadeTrace:
    """Collects events; times are µs after `START_US`."""

    events: list[str] = field(default_factory=list)
    links: int = 40

    def add(self, **event: Any) -> None:
        arguments = event.pop("args", None)
        lines = [f'    "{name}": {json.dumps(value)}' for name, value in event.items()]
        body = ",\n".join(lines)
        if arguments is not None:
            inner = ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in arguments.items())
            body += f'\n    ,\n    "args": {{\n      {inner}\n    }}'
        self.events.append(f"  {{\n{body}\n  }}")

    def span(
        self, cat: str, name: str, start: float, dur: float, *, thread: int = THREAD, **args: Any
    ) -> None:
        where = (HOST, thread) if not cat.startswith("gpu_") else (args.get("device", 0), 7)
        self.add(
            ph="X",
            cat=cat,
            name=name,
            pid=where[0],
            tid=where[1],
            ts=round(START_US + start, 3),
            dur=dur,
            args={"External id": 5, **args},
        )

    def launch(
        self,
        name: str,
        launched: float,
        dur: float,
        *,
        runs: float | None = None,
        cat: str = "kernel",
        call: str = "cudaLaunchKernel",
        thread: int = THREAD,
        device: int = 0,
        link: int | None = None,
    ) -> int:
        """A call of the runtime, the kernel that it starts, and the flow between both."""
        if link is None:
            self.links = link = self.links + 1
            self.span(
                "cuda_runtime", call, launched, 3.1, thread=thread, cbid=211, correlation=link
            )
            self.add(
                ph="s",
                id=link,
                pid=HOST,
                tid=thread,
                ts=round(START_US + launched, 3),
                cat="ac2g",
                name="ac2g",
            )
        begin = launched + 10.0 if runs is None else runs
        shape = {"grid": [132, 1, 1], "block": [384, 1, 1], "est. achieved occupancy %": 18}
        moved = {"bytes": 64, "memory bandwidth (GB/s)": 0.05}
        self.add(
            ph="X",
            cat=cat,
            name=name,
            pid=device,
            tid=7,
            ts=round(START_US + begin, 3),
            dur=dur,
            args={
                "External id": 5,
                "device": device,
                "context": 1,
                "stream": 7,
                "correlation": link,
                **(shape if cat == "kernel" else moved),
            },
        )
        self.add(
            ph="f",
            id=link,
            pid=device,
            tid=7,
            ts=round(START_US + begin, 3),
            cat="ac2g",
            name="ac2g",
            bp="e",
        )
        return link

    def text(self) -> str:
        meta = (
            '  {\n    "ph": "M",\n    "name": "process_labels",\n    "ts": 5175728979697.235,\n'
            '    "pid": 0,\n    "tid": 0,\n    "args": {\n      "labels": "GPU 0"\n    }\n  }'
        )
        end = (
            '  {\n    "ph": "i",\n    \n    "s": "g",\n    "name": "Record Window End",\n'
            '    "pid": "",\n    "tid": "",\n    "ts": 5175728980060.435\n    \n  }'
        )
        return HEAD + ",\n".join([meta, *self.events, end]) + TAIL

    def write(self, path: Path) -> Path:
        path.write_text(self.text(), encoding="utf-8")
        return path


def serving_steps() -> MadeTrace:
    """Two decode steps and a prefill with marks, launched ahead of the device, copies around."""
    trace = MadeTrace()
    trace.launch("Memcpy HtoD (Pinned -> Device)", 2.0, 1.5, cat="gpu_memcpy", call="cudaMemcpy")
    trace.span("user_annotation", "energylens::prefill", 20.0, 100.0)
    trace.launch("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", 30.0, 600.0, runs=50.0)
    trace.launch("Memset (Device)", 40.0, 2.0, runs=660.0, cat="gpu_memset", call="cudaMemsetAsync")
    for step, start in enumerate((200.0, 300.0)):
        # The device is still busy with the prefill: kernels run after the span of their step.
        trace.span("user_annotation", "energylens::decode", start, 60.0)
        link, runs = None, 700.0 + 200.0 * step
        for name, dur in LLAMA_DECODE:
            link = trace.launch(
                name, start + 5.0, dur, runs=runs, call="cudaGraphLaunch", link=link
            )
            runs += dur + 0.3
        trace.launch(
            "Memcpy DtoH (Device -> Pinned)", start + 50.0, 3.4, runs=runs, cat="gpu_memcpy"
        )
    trace.span("gpu_user_annotation", "energylens::decode", 700.0, 85.0)
    trace.span("gpu_user_annotation", "energylens::decode", 900.0, 85.0)
    return trace
