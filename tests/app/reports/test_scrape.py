"""/metrics of the whole application: sums, histograms, what is kept for a second, and what nobody answers."""

import asyncio
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app import metrics
from app.openai.errors import EngineFault
from app.reports.request_stats import Histogram, IngressStats, RequestStats
from app.reports.scrape import ModelStats, Scrape
from engine.outputs import EngineStats
from tests.app.conftest import Serve
from tests.app.http.test_lifecycle import Gate

ENGINE = EngineStats(
    num_running=2, num_waiting=1, total_blocks=10, live_blocks=5, cached_blocks=3, free_blocks=2, prompt_tokens=1234567,
    cached_prompt_tokens=40, generation_tokens=50, preemptions=1, steps=9, slots_used=70,
    waiting_tokens=30, queue_age_s=2.5, swap_out_bytes=0, swap_in_bytes=0,
)  # fmt: skip


def ingress(outstanding: int, ttft: float, pause: float) -> IngressStats:
    requests = RequestStats()
    requests.first_token_s.observe(ttft)
    requests.end("stop", 5, 0.0, ttft, ttft + 0.4)
    return IngressStats(
        outstanding, 1, requests, resubmitted=3, longest_pause_s=pause, queued_tokens=100, capacity=20,
        refused=outstanding, prompt_blocks=10, hit_blocks=4, routed={"a": outstanding, "b": 3},
    )  # fmt: skip


def samples(text: str) -> dict[str, float]:
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sample.labels.items() if key != "model_name"): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_series_are_sums_over_all_replicas_and_the_longest_pause_of_any() -> None:
    found = samples(metrics.render({'a "model"': ([ENGINE, ENGINE], [ingress(4, 0.03, 1.5), ingress(5, 0.2, 0.5)])}))
    assert found["vllm:num_requests_running"] == 4
    assert found["vllm:prompt_tokens_total"] == 2469134
    assert found["vllm:kv_cache_usage_perc"] == 0.5
    assert found["nanoserve:ingress_outstanding"] == 9
    assert found["nanoserve:failovers_total"] == 6
    assert (found["nanoserve:waiting_tokens"], found["nanoserve:queue_age_seconds"]) == (60, 2.5)
    assert (found["nanoserve:ingress_queued_tokens"], found["nanoserve:ingress_capacity"]) == (200, 20)
    assert found["nanoserve:ingress_refused_total"] == 9
    assert (found["nanoserve:router_prompt_blocks_total"], found["nanoserve:router_hit_blocks_total"]) == (20, 8)
    assert found["nanoserve:router_imbalance"] == 9 / 7.5, "9 requests to one and 6 to the other"
    assert found["nanoserve:failover_longest_pause_seconds"] == 1.5
    assert (found["nanoserve:engine_replicas"], found["nanoserve:ingress_replicas"]) == (2, 2)
    assert found["vllm:request_success_total,finished_reason=stop"] == 2
    assert found["vllm:time_to_first_token_seconds_bucket,le=0.04"] == 1
    assert found["vllm:time_to_first_token_seconds_bucket,le=0.25"] == 2
    assert found["vllm:time_to_first_token_seconds_count"] == 2
    assert found["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx(0.2)


def test_each_model_has_its_own_values_under_one_head() -> None:
    text = metrics.render({"a": ([ENGINE], [ingress(4, 0.03, 0)]), "b": ([], [ingress(1, 0.2, 0)])})
    assert text.count("# TYPE vllm:num_requests_running ") == text.count("# TYPE vllm:request_success_total ") == 1
    assert 'vllm:num_requests_running{model_name="a"} 2\nvllm:num_requests_running{model_name="b"} 0\n' in text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    counts = [s for s in families["vllm:time_to_first_token_seconds"].samples if s.name.endswith("_count")]
    assert [(s.labels["model_name"], s.value) for s in counts] == [("a", 1), ("b", 1)]


def test_a_value_on_a_bound_is_within_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([1, 2, 1], 13.5)


async def test_many_who_ask_at_once_cost_one_round_and_one_that_leaves_spoils_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = 0
    answer = asyncio.Event()

    async def engines() -> list[EngineStats]:
        nonlocal asked
        asked += 1
        await answer.wait()
        return [ENGINE] * asked

    scrape = Scrape({"m": engines}, lambda: {"m": ingress(1, 0.1, 0)})
    first, *others = [asyncio.ensure_future(scrape.text()) for _ in range(4)]
    await asyncio.sleep(0)
    first.cancel()
    answer.set()
    texts = await asyncio.gather(*others)
    assert len(set(texts)) == asked == 1
    assert await scrape.text() == texts[0]
    monkeypatch.setattr("app.reports.scrape.KEEP_S", 0.0)
    assert samples(await scrape.text())["nanoserve:engine_replicas"] == 2


async def test_a_pool_of_none_is_a_state_and_no_error() -> None:
    async def engines() -> list[EngineStats]:
        raise EngineFault("none")

    async def ingresses() -> list[ModelStats]:
        return []

    here = {"m": ingress(0, 0.1, 0)}
    found = samples(await Scrape({"m": engines}, lambda: here, ingresses).text())
    assert found["nanoserve:ingress_replicas"] == 1, "the one that is asked, if no other answers"
    assert found["nanoserve:engine_replicas"] == found["vllm:num_requests_running"] == 0


async def test_requests_are_counted_by_how_they_ended(scripted: Serve) -> None:
    async with scripted("abcdefgh", before_step=Gate(0.001)) as server:
        await server.complete("hello", max_tokens=4)
        await server.complete("hello", max_tokens=8, stop=["c"])
        await server.complete(["hello", "there"], max_tokens=2)
        text = (await server.http.get("/metrics")).text
    found = samples(text)
    assert found["vllm:request_success_total,finished_reason=length"] == 3
    assert found["vllm:request_success_total,finished_reason=stop"] == 1
    assert found["vllm:e2e_request_latency_seconds_count"] == found["vllm:time_to_first_token_seconds_count"] == 4
    assert found["vllm:request_queue_time_seconds_count"] == 4
    assert re.search(r"^# TYPE vllm:time_to_first_token_seconds histogram$", text, re.MULTILINE)
