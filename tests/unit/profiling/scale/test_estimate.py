"""The model of scale: small cases by hand, and what must hold in any."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_zero.profiling.scale.compare import compare
from lightning_zero.profiling.scale.estimate import Bytes, Estimate, estimate
from lightning_zero.profiling.scale.given import Cluster, Decoder, Model
from lightning_zero.profiling.scale.sharding import BEFORE, SHARDINGS

BY_NAME = {sharding.name: sharding for sharding in (*SHARDINGS, BEFORE)}
NAMES = list(BY_NAME)
FREE = {"launch_s": 0.0, "inside_hop_s": 0.0, "across_hop_s": 0.0}
# 3 hosts of 2; a layer has 600 elements: 1200 bytes in the compute and the wire dtype. Forward takes 1 s, backward 2.
MODEL = Model(1200, 2, tokens=10, flops_per_token=30.0, activation_bytes=7.0)
CLUSTER = Cluster(3, 2, 1e9, flops=50.0, memory_bandwidth=1e12, inside=1000.0, across=400.0, **FREE)


def of(name: str, model: Model = MODEL, cluster: Cluster = CLUSTER) -> Estimate:
    return estimate(model, cluster, BY_NAME[name])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("host", Bytes(800.0, 1600.0, 800.0, 1200.0, 2400.0, 2400.0, 7.0)),
        ("all", Bytes(800.0, 1600.0, 800.0, 400.0, 2400.0, 2400.0, 7.0)),
        ("flat", Bytes(800.0, 1600.0, 800.0, 400.0, 2400.0, 2400.0, 7.0)),
        ("hybrid", Bytes(2400.0, 4800.0, 2400.0, 1200.0, 2400.0, 2400.0, 7.0)),
        ("ddp", Bytes(4800.0, 9600.0, 4800.0, 2400.0, 0.0, 2400.0, 7.0)),
    ],
)
def test_bytes_of_each_role(name: str, expected: Bytes) -> None:
    assert of(name).memory == expected
    assert of(name).memory.total == sum(vars(expected).values())


def test_gradients_that_wait_for_the_step_take_room_besides() -> None:
    assert of("host, step").memory == of("host").memory, "one micro-batch waits for nothing"
    accumulated = of("host, step", replace(MODEL, micro_batches=2)).memory
    assert accumulated.gradients == 1200 * 4 / 6 + 1200 * 4 / 2
    assert accumulated.masters == 1200 * 4 / 6


# Seconds, by hand, of one layer: inside 1200 x 1/2 / 1000 = 0.6; across, of half a layer, 600 x 2/3 / 400 = 1.0. A
# layer's forward takes 1 s and its backward 2 s. Flat: inside 1200 x 5/6 / 1000 = 1.0, across 1200 x 2/3 / 800 = 1.0.
@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        # two layers' exchange; forward: gather 0.6, 1, max(1, 0.6); backward: gather 0.6, 2, max(2, 1.2, 1.0), reduce 1.6
        ("host, before", 2.0 + (0.6 + 1 + 1) + (0.6 + 2 + 2 + 1.6)),
        # the first gather 1.6, and then max(1, 0.6, 1.0)
        ("host", (1.6 + 1 + 1) + (0.6 + 2 + 2 + 1.6)),
        # the same with gathers across, too: across takes 2.0 beside 2.0 in backward
        ("all", (1.6 + 1 + 1) + (1.6 + 2 + 2 + 1.6)),
        ("flat", (1.0 + 1 + 1) + (1.0 + 2 + 2 + 1.0)),
        # no copies between hosts, but gradients there and back: 0.6 + 2 x 1.0
        ("hybrid", (0.6 + 1 + 1) + (0.6 + 2 + 2 + 2.6)),
        # nothing is gathered; an all-reduce is 2 x 1.0
        ("ddp", (1 + 1) + (2 + 2 + 2.0)),
    ],
)
def test_seconds_by_hand(name: str, seconds: float) -> None:
    model = replace(MODEL, flops_per_token=30.0)
    found = of(name, model, replace(CLUSTER, flops=50.0))
    assert found.compute_s == pytest.approx(6.0)
    assert found.compute_s + found.exposed_s == pytest.approx(seconds)


def test_what_is_reduced_once_in_a_step_crosses_hosts_once() -> None:
    model = replace(MODEL, micro_batches=3)
    # without the network, but for the first layer's exchange: the second's is beside the first
    each = 3 * ((0.6 + 1 + 1) + (0.6 + 2 + 2 + 0.6)) + 1.0
    assert of("host", model).seconds == pytest.approx(each + 3 * 1.0, abs=1e-6)
    assert of("host, step", model).seconds == pytest.approx(each + 2.0, abs=1e-6)


def test_the_step_reads_and_writes_its_bytes() -> None:
    slow = replace(CLUSTER, memory_bandwidth=100.0)
    assert MODEL.step_bytes == 38
    assert of("host", cluster=slow).step_s == pytest.approx(200 * 38 / 100)
    assert of("hybrid", cluster=slow).step_s == pytest.approx(600 * 38 / 100)


def test_hops_are_what_tells_many_hosts_apart() -> None:
    hops = Cluster(512, 8, 1e12, 1e15, 1e13, 1e15, 1e15, launch_s=0.0, inside_hop_s=1.0, across_hop_s=100.0)
    model = Model(512 * 8, 1, 1, 1.0)
    flat = of("flat", model, hops)
    assert flat.exposed_s == pytest.approx(3 * (511 * 100 + 3584 * 1), rel=1e-6)
    assert of("all", model, hops).exposed_s == pytest.approx(3 * (9 * 100 + 7 * 1), rel=1e-6)
    assert of("ddp", model, hops).exposed_s == pytest.approx(2 * (9 * 100 + 7 * 1), rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_with_links_that_take_no_time_only_compute_is_left(name: str) -> None:
    found = of(name, cluster=replace(CLUSTER, inside=1e30, across=1e30))
    assert found.exposed_s == pytest.approx(0, abs=1e-9)
    assert found.compute_s == pytest.approx(6.0)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_on_one_host_there_is_nothing_to_choose(micro_batches: int) -> None:
    model, one = replace(MODEL, micro_batches=micro_batches), replace(CLUSTER, hosts=1, launch_s=0.1)
    flat = of("flat", model, one)
    for name in ("host", "host, step", "host, before", "all", "hybrid"):
        found = of(name, model, one)
        assert found.memory == flat.memory
        assert found.seconds == pytest.approx(flat.seconds)


def test_alone_nothing_travels() -> None:
    for name in NAMES:
        assert of(name, cluster=replace(CLUSTER, hosts=1, gpus=1, launch_s=9.0)).exposed_s == 0


@pytest.mark.parametrize("name", NAMES)
def test_more_of_anything_good_is_never_slower(name: str) -> None:
    before = of(name).seconds
    for better in ("inside", "across", "flops", "memory_bandwidth"):
        assert of(name, cluster=replace(CLUSTER, **{better: getattr(CLUSTER, better) * 2})).seconds <= before, better
    for worse in ("launch_s", "inside_hop_s", "across_hop_s"):
        assert of(name, cluster=replace(CLUSTER, **{worse: 0.5})).seconds >= before, worse
    for hosts in (6, 24, 512):
        more = of(name, cluster=replace(CLUSTER, hosts=hosts)).memory.total
        assert more <= of(name).memory.total


def test_weights_that_stay_are_gathered_once_and_take_their_bytes() -> None:
    slow = replace(CLUSTER, inside=10.0, across=10.0)
    model = replace(MODEL, micro_batches=2)
    seconds = [of("host", replace(model, kept=kept), slow).seconds for kept in ("no", "backward", "step")]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 3
    deep = replace(MODEL, layers=6)
    assert of("host", deep).memory.gathered == 2 * 200 * 2
    assert of("host", replace(deep, kept="backward")).memory.gathered == 1200 * 2


def test_the_fastest_that_fits_comes_first_and_others_say_by_how_much_they_are_slower() -> None:
    found = compare(replace(MODEL, micro_batches=4), replace(CLUSTER, across=40.0))
    assert [choice.name for choice in found] == ["host, step", "host", "ddp", "hybrid", "flat", "all"]
    assert [choice.slower for choice in found] == sorted(choice.slower for choice in found)
    assert found[0].slower == 0
    assert found[-1].slower == pytest.approx(found[-1].estimate.seconds / found[0].estimate.seconds - 1)


def test_what_does_not_fit_comes_last() -> None:
    room = of("all").memory.total
    found = compare(MODEL, replace(CLUSTER, memory=room))
    assert {choice.name for choice in found if choice.estimate.fits} == {"all", "flat"}
    assert [choice.estimate.fits for choice in found] == [True] * 2 + [False] * 4
    assert found[-1].name == "ddp"
    assert not compare(MODEL, replace(CLUSTER, memory=1.0))[0].estimate.fits


def test_what_is_as_fast_leaves_the_default_first() -> None:
    assert compare(MODEL, replace(CLUSTER, inside=1e30, across=1e30))[0].name == "host"
    with pytest.raises(ValueError, match="SHARDINGS"):
        compare(MODEL, CLUSTER, [])


def test_a_decoder_by_hand() -> None:
    shape = Decoder(1000, layers=3, width=8, hidden=16, key_value=4, vocabulary=10)
    plain, again = shape.model(2, 5), shape.model(2, 5, recompute=True)
    assert plain.tokens == 10
    assert plain.flops_per_token == 6000 + 6 * 3 * 8 * 5
    assert plain.activation_bytes == 3 * 2 * (32 + 8 + 32) * 10 + 6 * 10 * 10
    assert again.flops_per_token == pytest.approx(plain.flops_per_token * 4 / 3)
    assert again.activation_bytes == 3 * 2 * 8 * 10 + 2 * (32 + 8 + 32) * 10 + 6 * 10 * 10
    # forward takes as long as before
    assert again.flops * (1 - again.backward_share) == pytest.approx(plain.flops * (1 - plain.backward_share))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"parameters": 0}, "Model.parameters=0: pass a positive"), ({"activation_bytes": -1.0}, "a non-negative")],
)
def test_numbers_that_cannot_be_are_named(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(MODEL, **change)
    with pytest.raises(ValueError, match=r"Cluster.across=0: pass a positive"):
        replace(CLUSTER, across=0)
    with pytest.raises(ValueError, match="backward_share=1"):
        replace(MODEL, backward_share=1)
