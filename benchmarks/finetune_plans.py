"""Which GPUs fine-tune which pretrained model: tables in Markdown, by the planner.

python -m benchmarks.finetune_plans
"""

from tfgpu.parallel.planning import planner
from tfgpu.parallel.planning.pretrained import DECODERS, Decoder

SEQUENCE, ROWS, RANK = 2048, 8, 16
GPUS = {"24": "l4", "40": "a100-40", "80": "h100-80"}
WAYS = {
    "all weights": {},
    "LoRA, float32": {"lora": RANK, "weights": "float32"},
    "LoRA, int8": {"lora": RANK, "weights": "int8"},
    "LoRA, int4": {"lora": RANK, "weights": "int4"},
}
LAYOUTS = {
    "mirrored": {},
    "ZeRO 1": {"zero": 1},
    "ZeRO 3": {"zero": 3},
    "pipeline": {"pipeline": 0},
    "tensor": {"tensor": 0},
}


def plans(decoder: Decoder, way: str, count: int, device: str, *, memory: str | None = None) -> list[planner.Plan]:
    """All plans of a model and a way over devices of one kind."""
    return planner.plan(
        decoder.workload(SEQUENCE, **WAYS[way]), count, batch=ROWS * count, device=device, memory=memory
    )


def of_layout(found: list[planner.Plan], layout: str, count: int) -> list[planner.Plan]:
    """The plans of one layout over all devices, however it splits the batch and what it recomputes."""
    wanted = {name: value or count for name, value in LAYOUTS[layout].items()}
    copies = count if layout in ("mirrored", "ZeRO 1", "ZeRO 3") else 1
    sizes = {"data": copies, "pipeline": 1, "tensor": 1, "zero": 0} | wanted
    return [each for each in found if all(getattr(each.layout, name) == size for name, size in sizes.items())]


def least(found: list[planner.Plan]) -> str:
    """The least memory of some plans, in GB."""
    return f"{min(each.memory.peak for each in found) / 1e9:.0f}" if found else "-"


def quickest(found: dict[str, list[planner.Plan]]) -> str:
    """The layout that fits and takes the least time, with the time of a step."""
    fitting = [(each.step_time_s, name) for name, plans in found.items() for each in plans if each.fits]
    return f"{min(fitting)[1]}, {min(fitting)[0]:.1f} s" if fitting else "-"


def main() -> None:
    head = f"| GPUs | what is trained | {' | '.join(LAYOUTS)} | {' | '.join(f'{size} GB' for size in GPUS)} |"
    for decoder in (each for each in DECODERS.values() if each.experts == 1):
        print(f"**{decoder.name}**, {decoder.parameters / 1e9:.2f} billion weights:\n\n{head}")
        print("|---" * (2 + len(LAYOUTS) + len(GPUS)) + "|")
        for count in (1, 2, 8):
            for way in WAYS:
                names = list(LAYOUTS) if count > 1 else ["mirrored"]
                by_size = {}
                for size, device in GPUS.items():
                    found = plans(decoder, way, count, device)
                    by_size[size] = {name: of_layout(found, name, count) for name in names}
                tight = plans(decoder, way, count, GPUS["80"], memory="1MB")  # nothing fits: the least memory is best
                cells = [least(of_layout(tight, name, count)) if name in names else "-" for name in LAYOUTS]
                times = [quickest(by_size[size]) for size in GPUS]
                print(f"| {count} | {way} | {' | '.join(cells)} | {' | '.join(times)} |")
        print()


if __name__ == "__main__":
    main()
