"""The engine's state in Prometheus text: vLLM's names where vLLM has the series, ours for the rest."""

from collections.abc import Sequence

from engine.outputs import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(model: str, replicas: Sequence[EngineStats], outstanding: int, queued: int) -> str:
    """Sums over the engine replicas. outstanding, queued: of this ingress, in the engine and before it."""

    def total(field: str) -> int:
        return sum(int(getattr(stats, field)) for stats in replicas)

    blocks, live = total("total_blocks"), total("live_blocks")
    series: list[tuple[str, str, str, float]] = [
        ("vllm:num_requests_running", "gauge", "Requests in the running batch.", total("num_running")),
        ("vllm:num_requests_waiting", "gauge", "Requests that wait in the engine.", total("num_waiting")),
        ("vllm:kv_cache_usage_perc", "gauge", "Live KV blocks over all, 0 to 1.", live / blocks if blocks else 0.0),
        ("vllm:prompt_tokens_total", "counter", "Prompt tokens taken in.", total("prompt_tokens")),
        ("vllm:generation_tokens_total", "counter", "Tokens made.", total("generation_tokens")),
        ("vllm:prefix_cache_queries_total", "counter", "Tokens looked up in the prefix cache.", total("prompt_tokens")),
        ("vllm:prefix_cache_hits_total", "counter", "Tokens found there.", total("cached_prompt_tokens")),
        ("vllm:num_preemptions_total", "counter", "Requests that gave up their blocks.", total("preemptions")),
        ("nanoserve:live_blocks", "gauge", "KV blocks that requests hold.", live),
        ("nanoserve:cached_blocks", "gauge", "KV blocks that only the prefix cache holds.", total("cached_blocks")),
        ("nanoserve:free_blocks", "gauge", "KV blocks with nothing in them.", total("free_blocks")),
        ("nanoserve:live_slots_used", "gauge", "KV slots in live blocks with a token.", total("slots_used")),
        ("nanoserve:steps_total", "counter", "Engine steps.", total("steps")),
        ("nanoserve:engine_replicas", "gauge", "Engine replicas that answered.", len(replicas)),
        ("nanoserve:ingress_outstanding", "gauge", "Requests this ingress has in the engine.", outstanding),
        ("nanoserve:ingress_queued", "gauge", "Requests that wait in this ingress.", queued),
    ]
    label = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "".join(
        f'# HELP {name} {help_text}\n# TYPE {name} {kind}\n{name}{{model_name="{label}"}} {value:g}\n'
        if isinstance(value, float)
        else f'# HELP {name} {help_text}\n# TYPE {name} {kind}\n{name}{{model_name="{label}"}} {value}\n'
        for name, kind, help_text, value in series
    )
