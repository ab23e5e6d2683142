"""The application's state in Prometheus text: vLLM's names where vLLM has the series, ours for the rest."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from app.reports.request_stats import Histogram, IngressStats, RequestStats
from engine.outputs import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(models: Mapping[str, tuple[Sequence[EngineStats], Sequence[IngressStats]]]) -> str:
    """Of each model, sums over all replicas of both kinds."""
    labels = [f'model_name="{_escaped(model)}"' for model in models]
    of_models = [[*_engine_series(engines), *_ingress_series(ingresses)] for engines, ingresses in models.values()]
    lines: list[str] = []
    for same in zip(*of_models, strict=True):
        name, kind, help_text, _ = same[0]
        lines += _head(name, kind, help_text)
        lines += [f"{name}{{{label}}} {series[-1]}" for label, series in zip(labels, same, strict=True)]
    requests = [_all_requests(ingresses) for _, ingresses in models.values()]
    lines += _head("vllm:request_success_total", "counter", "Requests that ended, by how.")
    for label, of_model in zip(labels, requests, strict=True):
        for reason, count in sorted(of_model.finished.items()):
            lines.append(f'vllm:request_success_total{{{label},finished_reason="{reason}"}} {count}')
    for histograms in zip(*map(_histograms, requests), strict=True):
        name, help_text, _ = histograms[0]
        lines += _head(name, "histogram", help_text)
        for label, (_, _, histogram) in zip(labels, histograms, strict=True):
            lines += _buckets(name, label, histogram)
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _all_requests(ingresses: Sequence[IngressStats]) -> RequestStats:
    requests = RequestStats()
    for ingress in ingresses:
        requests.add(ingress.requests)
    return requests


Series = tuple[str, str, str, float]


def _engine_series(engines: Sequence[EngineStats]) -> list[Series]:
    def total(field: str) -> int:
        return sum(int(getattr(stats, field)) for stats in engines)

    blocks, live = total("total_blocks"), total("live_blocks")
    oldest = max((stats.queue_age_s for stats in engines), default=0.0)
    return [
        ("vllm:num_requests_running", "gauge", "Requests in the running batches.", total("num_running")),
        ("vllm:num_requests_waiting", "gauge", "Requests that wait in the engines.", total("num_waiting")),
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
        ("nanoserve:swap_out_bytes_total", "counter", "CPU-GPU bytes: KV copied to the host.", total("swap_out_bytes")),
        ("nanoserve:swap_in_bytes_total", "counter", "CPU-GPU bytes: KV copied back.", total("swap_in_bytes")),
        ("nanoserve:adapter_loads_total", "counter", "LoRA adapters brought to a device.", total("adapter_loads")),
        ("nanoserve:steps_total", "counter", "Engine steps.", total("steps")),
        ("nanoserve:engine_replicas", "gauge", "Engine replicas that answered.", len(engines)),
        ("nanoserve:waiting_tokens", "gauge", "Tokens of those that wait in the engines.", total("waiting_tokens")),
        ("nanoserve:queue_age_seconds", "gauge", "How long the first of them has waited.", oldest),
    ]


def _ingress_series(ingresses: Sequence[IngressStats]) -> list[Series]:
    def total(field: str) -> int:
        return sum(int(getattr(stats, field)) for stats in ingresses)

    pause = max((stats.longest_pause_s for stats in ingresses), default=0.0)
    capacity = max((stats.capacity for stats in ingresses), default=0)
    return [
        ("nanoserve:ingress_replicas", "gauge", "Ingress replicas that answered.", len(ingresses)),
        ("nanoserve:ingress_outstanding", "gauge", "Requests given to the engines.", total("outstanding")),
        ("nanoserve:ingress_queued", "gauge", "Requests that wait in the ingresses.", total("queued")),
        ("nanoserve:ingress_queued_tokens", "gauge", "Tokens that they ask for.", total("queued_tokens")),
        ("nanoserve:ingress_capacity", "gauge", "Requests that the engines are given at most.", capacity),
        ("nanoserve:ingress_refused_total", "counter", "Requests answered 429: no place.", total("refused")),
        ("nanoserve:router_prompt_blocks_total", "counter", "Full prompt blocks sent out.", total("prompt_blocks")),
        ("nanoserve:router_hit_blocks_total", "counter", "Sent to where they were known.", total("hit_blocks")),
        ("nanoserve:router_imbalance", "gauge", "Most requests of an engine over the mean.", _imbalance(ingresses)),
        ("nanoserve:failovers_total", "counter", "Requests that went on elsewhere.", total("resubmitted")),
        ("nanoserve:failovers_given_up_total", "counter", "Lost requests that failed.", total("given_up")),
        ("nanoserve:failover_longest_pause_seconds", "gauge", "Longest pause of a stream by a loss.", pause),
    ]


def _imbalance(ingresses: Sequence[IngressStats]) -> float:
    """1 is even. Of the engines that one ingress at least has sent to, or could."""
    routed: Counter[str] = Counter()
    for stats in ingresses:
        routed.update(stats.routed)
    total = routed.total()
    return max(routed.values()) * len(routed) / total if total else 1.0


def _histograms(requests: RequestStats) -> list[tuple[str, str, Histogram]]:
    return [
        ("vllm:time_to_first_token_seconds", "From arrival to the first token.", requests.first_token_s),
        ("vllm:request_time_per_output_token_seconds", "Mean time between tokens, by request.", requests.token_s),
        ("vllm:e2e_request_latency_seconds", "From arrival to the end.", requests.request_s),
        ("vllm:request_queue_time_seconds", "From arrival to the engine.", requests.queue_s),
    ]


def _head(name: str, kind: str, help_text: str) -> tuple[str, str]:
    return f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"


def _buckets(name: str, labels: str, histogram: Histogram) -> Iterator[str]:
    count = 0
    for bound, more in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        count += more
        yield f'{name}_bucket{{{labels},le="{bound}"}} {count}'
    yield f"{name}_sum{{{labels}}} {histogram.total}"
    yield f"{name}_count{{{labels}}} {count}"
