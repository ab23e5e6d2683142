"""The router's choice alone, what the ingress knows of the pool, and that Serve can take the class by value."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
from ray import cloudpickle
from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from ray.serve.config import RequestRouterConfig

from app.reports.pool import Pool
from app.router import FULL_KV, QUEUE_KNOWN_S, Affinity, AffinityRouter, Busy
from engine.block_hash import block_hashes

NAMES = ("a", "b", "c", "d")
IDLE = dict.fromkeys(NAMES, Busy(slots=16))


def prompt(group: int, suffix: int = 0, blocks: int = 32, shared: int = 28) -> list[bytes]:
    """Digests of a prompt that begins like all of its group."""
    ids = [group * 1000 + i for i in range(shared * 16)]
    ids += [900_000 + suffix * 1000 + i for i in range((blocks - shared) * 16)]
    return block_hashes(ids, 16)


def best(affinity: Affinity, hashes: list[bytes], busy: dict[str, Busy] = IDLE, session: str | None = None) -> str:
    return affinity.rank(hashes, session, busy)[0][0]


def test_a_known_prefix_goes_where_it_is() -> None:
    affinity = Affinity()
    for group, name in enumerate(NAMES):
        affinity.learn(prompt(group, 1), None, name, Busy())
    for group, name in enumerate(NAMES):
        assert best(affinity, prompt(group, 2)) == name
        assert affinity.rank(prompt(group, 2), None, IDLE)[1][name] == 28


def test_a_busy_replica_gives_its_prefix_away() -> None:
    affinity = Affinity()
    for suffix in range(5):
        for group in range(8):
            affinity.learn(prompt(group, suffix), None, NAMES[group % 4], Busy())
    some, many = IDLE | {"a": Busy(3, 16)}, IDLE | {"a": Busy(18, 16)}
    assert best(affinity, prompt(4, 99), some) == "a"
    assert best(affinity, prompt(4, 99), many) != "a"
    everybody = dict.fromkeys(NAMES, Busy(15, 16))
    assert best(affinity, prompt(4, 99), everybody) == "a"


def test_what_is_cached_is_not_computed_again_where_much_runs() -> None:
    affinity = Affinity()
    affinity.learn(prompt(1), None, "a", Busy())
    busy = IDLE | dict.fromkeys("bcd", Busy(9, 16))
    assert affinity.rank(prompt(1, 2), None, busy | {"a": Busy(20, 16)})[0] == ["a"], "even if it has to wait"
    assert best(affinity, prompt(1, 2), busy | {"a": Busy(20, 16), "c": Busy(2, 16)}) == "c"
    assert best(affinity, prompt(1, 2), busy | {"a": Busy(50, 16)}) != "a", "but not for ever"
    for group in range(2, 40):
        name = best(affinity, prompt(group))
        ranked, _ = affinity.rank(prompt(group), None, busy | {name: Busy(20, 16)})
        assert sorted(ranked) == list(NAMES), "what nobody has need wait for nobody"
        assert ranked[0] != name


def test_what_is_given_away_goes_to_the_same_replica_from_all_ingress_replicas() -> None:
    one, other = Affinity(), Affinity()
    second = Counter()
    for group in range(100):
        busy = IDLE | {best(one, prompt(group, 1)): Busy(12, 16)}
        to = best(one, prompt(group, 1), busy)
        assert best(other, prompt(group, 2), busy) == to
        second[to] += 1
        busy[to] = Busy(12, 16)
        assert best(other, prompt(group, 3), busy) == best(one, prompt(group, 4), busy)
    assert min(second.values()) > 10, "and not all to one"


def test_a_prefix_that_is_asked_for_most_gets_several_homes_and_others_keep_one() -> None:
    one, other = Affinity(), Affinity()
    for suffix in range(200):
        for affinity in (one, other):
            affinity.learn(prompt(1 if suffix % 2 else 100 + suffix, suffix), None, "a", Busy())
    busy = dict.fromkeys(NAMES, Busy(8, 16)) | {"a": Busy(15, 16)}
    homes = {best(affinity, prompt(1, 900 + i), busy) for i in range(40) for affinity in (one, other)}
    assert "a" not in homes, "though only it is known to have it"
    assert 2 <= len(homes) <= 3
    for group in range(100, 300, 2):
        assert len({best(affinity, prompt(group, i), busy) for i in range(5) for affinity in (one, other)}) == 1


def test_a_replica_without_free_kv_gives_its_prefix_away() -> None:
    affinity = Affinity()
    affinity.learn(prompt(1), None, "a", Busy())
    full = IDLE | {"a": Busy(2, 16, kv_free=FULL_KV / 2)}
    assert best(affinity, prompt(1, 2), full) != "a"


def test_ingress_replicas_agree_about_prompts_and_sessions_that_neither_knows() -> None:
    one, other = Affinity(), Affinity()
    homes = Counter()
    for group in range(200):
        home = best(one, prompt(group, 1))
        assert best(other, prompt(group, 2)) == home
        homes[home] += 1
        assert best(one, [], session=f"s{group}") == best(other, [], session=f"s{group}")
    assert min(homes.values()) > 30, "and the homes are spread"


def test_a_session_stays_where_it_is() -> None:
    affinity = Affinity()
    affinity.learn([], "chat", "c", Busy())
    assert best(affinity, prompt(5), session="chat") == "c"
    without = {name: busy for name, busy in IDLE.items() if name != "c"}
    assert best(affinity, prompt(5), without, session="chat") in without


def test_a_change_of_the_pool_moves_only_the_prompts_of_those_that_left() -> None:
    homes = {group: best(Affinity(), prompt(group)) for group in range(100)}
    without = {name: busy for name, busy in IDLE.items() if name != "b"}
    for group, home in homes.items():
        if home != "b":
            assert best(Affinity(), prompt(group), without) == home


def test_who_is_gone_is_forgotten() -> None:
    affinity = Affinity()
    affinity.learn(prompt(1), None, "a", Busy())
    affinity.learn(prompt(1), None, "b", Busy())
    affinity.forget({"a"})
    assert affinity.rank(prompt(1), None, IDLE)[1] == {"a": 0, "b": 32, "c": 0, "d": 0}
    affinity.forget({"b"})
    assert not affinity._known


def test_what_a_cache_cannot_hold_is_forgotten_the_oldest_and_the_ends_first() -> None:
    affinity = Affinity()
    small = Busy(blocks=40)
    for group in (1, 2, 1):
        affinity.learn(prompt(group, blocks=28), None, "a", small)
    assert affinity.found(prompt(1, blocks=28), ["a"]) == {"a": 28}
    assert affinity.found(prompt(2, blocks=28), ["a"]) == {"a": 12}


def test_a_new_replica_gets_its_share_of_one_prefix_that_all_use() -> None:
    """Everybody asks with one system prompt; one of four replicas is new. Requests take as long as 60 arrivals."""
    affinity = Affinity()
    rng = random.Random(1)
    for suffix in range(50):
        for name in "abc":
            affinity.learn(prompt(7, suffix), None, name, Busy())
    running: list[str] = []
    got: Counter[str] = Counter()
    for suffix in range(100, 1000):
        load = Counter(running)
        busy = {name: Busy(load[name], 16) for name in NAMES}
        hashes = prompt(7, suffix)
        name = best(affinity, hashes, busy)
        affinity.learn(hashes, None, name, Busy())
        running.append(name)
        got[name] += 1
        if len(running) > 50:
            running.pop(rng.randrange(len(running)))
    assert min(got.values()) > 0.7 * 900 / 4
    assert max(got.values()) < 1.4 * 900 / 4


def test_short_prompts_are_spread_by_load() -> None:
    affinity = Affinity()
    busy = {"a": Busy(3, 16), "b": Busy(1, 16), "c": Busy(2, 16)}
    assert affinity.rank([], None, busy)[0] == ["b", "c", "a"]
    assert {best(affinity, []) for _ in range(100)} == set(NAMES), "and not always to the same when all are idle"


def test_the_pool_tells_its_size_and_where_requests_went() -> None:
    pool = Pool()
    told: list[int] = []
    pool.follow(told.append)
    assert told == []
    pool.update({"a", "b"})
    pool.update({"a", "c"})
    pool.update({"a"})
    pool.update(set())
    assert told == [2, 1, 0]
    pool.update({"a", "b"})
    for _ in range(3):
        pool.note("a", 10, 5)
    pool.note("b", 10, 0)
    assert (pool.prompt_blocks, pool.hit_blocks, pool.routed()) == (40, 15, {"a": 3, "b": 1})
    pool.update({"b"})
    assert pool.routed() == {"b": 1}
    late: list[int] = []
    pool.follow(late.append)
    assert late == [1]


def test_serve_takes_the_router_by_value() -> None:
    config = RequestRouterConfig(request_router_class=AffinityRouter)
    data = config.get_serialized_request_router_cls()
    assert data is not None
    assert b"engine." not in data
    assert cloudpickle.loads(data).__name__ == "AffinityRouter"


def test_a_queue_of_which_nothing_was_heard_for_long_is_as_its_replica_reports() -> None:
    """Ten requests of another ingress replica were there at this one's last request, and have ended since."""
    now = 100.0
    router = AffinityRouter(DeploymentID("engine", "app"), DeploymentHandleSource.UNKNOWN, get_curr_time_s=lambda: now)
    router.initialize_state()
    replica = SimpleNamespace(replica_id="a", routing_stats={"load": 1})
    router._replica_queue_len_cache.update("a", 11)
    assert router._busy(replica).requests == 11
    now += QUEUE_KNOWN_S + 0.1
    assert router._busy(replica).requests == 1


@pytest.mark.parametrize("blocks", [1, 2000])
def test_prompts_of_any_length_have_a_home(blocks: int) -> None:
    assert best(Affinity(), prompt(1, blocks=blocks, shared=blocks)) in NAMES
