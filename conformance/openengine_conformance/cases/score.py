# SPDX-License-Identifier: Apache-2.0
"""Score: groups, candidates, label tokens and normalization."""

from __future__ import annotations

import math

from openengine.v1 import model_pb2, tasks_pb2
from openengine_conformance import needs, tasking
from openengine_conformance.case import case
from openengine_conformance.checks import Code, expect, expect_close, expect_equal, expect_in, skip
from openengine_conformance.context import Context

Options = tasks_pb2.ScoreOptions
NONE, SOFTMAX = tasks_pb2.SCORE_NORMALIZATION_NONE, tasks_pb2.SCORE_NORMALIZATION_SOFTMAX
PROBABILITIES = tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES
LABELS = [41, 40, 60]
LARGEST = 2048

LABEL_SCORING = needs.Advertised(
    "label-token scoring", lambda offer: offer.info.tasks.score.supports_label_token_scoring
)


def _offers(ctx: Context) -> model_pb2.ScoreCapabilities:
    return ctx.offer.info.tasks.score


def _group(ctx: Context, name: str = "g", candidates: int = 2, query: int = 5) -> tasks_pb2.ScoreGroup:
    batch = tasking.items(ctx, candidates)
    return tasks_pb2.ScoreGroup(group_id=name, query=tasking.item(ctx, "query", query), candidates=batch)


def _request(
    ctx: Context, groups: list[tasks_pb2.ScoreGroup], options: tasks_pb2.ScoreOptions | None = None
) -> tasks_pb2.ScoreRequest:
    return tasks_pb2.ScoreRequest(context=tasking.context(ctx), groups=groups, options=options)


async def _score(
    ctx: Context, groups: list[tasks_pb2.ScoreGroup], options: tasks_pb2.ScoreOptions | None = None
) -> tasks_pb2.ScoreResponse:
    answer: tasks_pb2.ScoreResponse = await tasking.run(ctx, tasking.SCORE, _request(ctx, groups, options))
    expect(answer.granularity, "the granularity is UNSPECIFIED", "SCO-06")
    expect(answer.semantics, "the semantics are UNSPECIFIED", "SCO-06")
    expect(answer.normalization, "the normalization is UNSPECIFIED", "SCO-03")
    for tensor in tasking.tensors(answer):
        tasking.check_tensor(tensor)
    return answer


async def _reject(ctx: Context, request: tasks_pb2.ScoreRequest, names: str = "", *codes: Code) -> None:
    await tasking.choose_scoring(ctx, request)
    await ctx.refused(ctx.rpc.Score, request, *(codes or (Code.INVALID_ARGUMENT,)), names=names)


def _values(answer: tasks_pb2.ScoreResponse) -> list[list[list[float]]]:
    return [[list(candidate.scores.values) for candidate in group.candidates] for group in answer.groups]


@case(
    "score.bad_groups",
    "No group, or one without query, candidates or unique ids, is INVALID_ARGUMENT.",
    "SCO-01",
    needs=[needs.SCORE],
)
async def bad_groups(ctx: Context) -> None:
    await _reject(ctx, _request(ctx, []), "groups")
    without_query, twice, as_query = _group(ctx), _group(ctx), _group(ctx)
    without_query.ClearField("query")
    twice.candidates[1].item_id = twice.candidates[0].item_id
    as_query.candidates[1].item_id = as_query.query.item_id
    await _reject(ctx, _request(ctx, [without_query]), "query")
    await _reject(ctx, _request(ctx, [_group(ctx, candidates=0)]), "candidates")
    await _reject(ctx, _request(ctx, [_group(ctx), _group(ctx)]), "group_id")
    await _reject(ctx, _request(ctx, [twice]), "item_id")
    await _reject(ctx, _request(ctx, [as_query]), "item_id")


@case(
    "score.order",
    "Groups and candidates keep request order and carry their indexes, zero included, each exactly once.",
    "SCO-05",
    needs=[needs.SCORE],
)
async def order(ctx: Context) -> None:
    groups = [
        _group(ctx, name, candidates, query)
        for name, candidates, query in (("z", 3, 1), ("a", 1, 2), ("m", 2, 3))
    ]
    answer = await _score(ctx, groups)
    found = [(group.group_id, group.group_index, group.HasField("group_index")) for group in answer.groups]
    expect_equal(
        found, [("z", 0, True), ("a", 1, True), ("m", 2, True)], "the list of (id, index, index present)"
    )
    for asked, group in zip(groups, answer.groups, strict=True):
        expected = [(one.item_id, number, True) for number, one in enumerate(asked.candidates)]
        candidates = [
            (c.candidate_id, c.candidate_index, c.HasField("candidate_index")) for c in group.candidates
        ]
        expect_equal(candidates, expected, f"the candidates of group {group.group_id}")


@case(
    "score.never_sorted",
    "Candidates come in request order even when their scores would sort otherwise.",
    "SCO-05",
    needs=[needs.SCORE],
    exclusive=True,
)
async def never_sorted(ctx: Context) -> None:
    """The same candidates in two orders: one of them is not the order of the scores."""
    forward = _group(ctx, candidates=5)
    backward = tasks_pb2.ScoreGroup(
        group_id="g", query=forward.query, candidates=reversed(forward.candidates)
    )
    for group in (forward, backward):
        answer = await _score(ctx, [group])
        names = [candidate.candidate_id for candidate in answer.groups[0].candidates]
        expect_equal(names, [one.item_id for one in group.candidates], "the order of the candidates")


@case(
    "score.stated",
    "Granularity, semantics and normalization are stated; rankable scores say which way is better.",
    "SCO-06",
    needs=[needs.SCORE],
)
async def stated(ctx: Context) -> None:
    answer = await _score(ctx, [_group(ctx)])
    rankable = all(len(values) == 1 for group in _values(answer) for values in group)
    if rankable:
        expect(
            answer.HasField("higher_is_better"),
            "one score for each candidate, but higher_is_better is absent",
        )
    if _offers(ctx).semantics:
        expect_in(answer.semantics, _offers(ctx).semantics, "the semantics")
    if _offers(ctx).granularities:
        expect_in(answer.granularity, _offers(ctx).granularities, "the granularity")


@case(
    "score.groups_equal_single_calls",
    "N groups give the numbers of N single calls.",
    "SCO-07",
    needs=[needs.SCORE],
    exclusive=True,
)
async def groups_equal_single_calls(ctx: Context) -> None:
    groups = [_group(ctx, f"group-{number}", 2, number) for number in range(3)]
    together = _values(await _score(ctx, groups))
    for number, group in enumerate(groups):
        alone = _values(await _score(ctx, [group]))[0]
        for one, other in zip(alone, together[number], strict=True):
            apart = tasking.distance(one, other)
            expect(apart < 0.02, f"group {number} scores {other} among others and {one} alone")


@case(
    "score.label_tokens",
    "label_token_ids come back in order, and each candidate has one value for each label.",
    "SCO-02",
    needs=[needs.SCORE, LABEL_SCORING],
)
async def label_tokens(ctx: Context) -> None:
    answer = await _score(ctx, [_group(ctx, candidates=3)], Options(label_token_ids=LABELS))
    expect_equal(list(answer.label_token_ids), LABELS, "label_token_ids")
    for values in _values(answer)[0]:
        expect_equal(len(values), len(LABELS), "the number of values of a candidate")


@case(
    "score.label_order",
    "The values follow the order of label_token_ids.",
    "SCO-02",
    needs=[needs.SCORE, LABEL_SCORING],
    exclusive=True,
)
async def label_order(ctx: Context) -> None:
    one = _values(await _score(ctx, [_group(ctx)], Options(label_token_ids=LABELS)))[0][0]
    other = _values(await _score(ctx, [_group(ctx)], Options(label_token_ids=LABELS[::-1])))[0][0]
    apart = tasking.distance(one, other[::-1])
    expect(apart < 0.02, f"labels {LABELS} score {one}, in reverse order {other}")


@case(
    "score.bad_labels",
    "Repeated label ids, or ones outside the vocabulary, are INVALID_ARGUMENT.",
    "SCO-02",
    needs=[needs.SCORE, LABEL_SCORING],
)
async def bad_labels(ctx: Context) -> None:
    for labels in ([40, 41, 40], [40, 2**32 - 1]):
        await _reject(ctx, _request(ctx, [_group(ctx)], Options(label_token_ids=labels)), "label_token_ids")


@case(
    "score.labels_unadvertised",
    "label_token_ids are rejected by name when they are not advertised.",
    "TASK-03",
    needs=[needs.SCORE, ~LABEL_SCORING],
)
async def labels_unadvertised(ctx: Context) -> None:
    await _reject(ctx, _request(ctx, [_group(ctx)], Options(label_token_ids=[40])), "label_token_ids")


@case(
    "score.softmax",
    "SOFTMAX sums to 1 over each label vector, and is stated.",
    "SCO-03",
    needs=[needs.SCORE, LABEL_SCORING],
)
async def softmax(ctx: Context) -> None:
    if SOFTMAX not in _offers(ctx).normalizations:
        skip("SOFTMAX is not advertised")
    answer = await _score(ctx, [_group(ctx)], Options(label_token_ids=LABELS, normalization=SOFTMAX))
    expect_equal(answer.normalization, SOFTMAX, "the normalization")
    for values in _values(answer)[0]:
        expect_close(math.fsum(values), 1.0, 0.01, "the sum over the labels")


@case(
    "score.none",
    "NONE gives native values, of which SOFTMAX keeps the order.",
    "SCO-03",
    needs=[needs.SCORE, LABEL_SCORING],
    exclusive=True,
)
async def none(ctx: Context) -> None:
    if not {NONE, SOFTMAX} <= set(_offers(ctx).normalizations):
        skip("NONE and SOFTMAX are not both advertised")
    native = await _score(ctx, [_group(ctx)], Options(label_token_ids=LABELS, normalization=NONE))
    expect_equal(native.normalization, NONE, "the normalization")
    normal = await _score(ctx, [_group(ctx)], Options(label_token_ids=LABELS, normalization=SOFTMAX))
    for one, other in zip(_values(native)[0], _values(normal)[0], strict=True):
        expect(_order(one) == _order(other), f"NONE gives {one}, SOFTMAX {other}: another order")
        if native.semantics == PROBABILITIES:
            total = math.fsum(one)
            expect(total < 1.001, f"native probabilities of {len(one)} labels sum to {total:.4f}")
            scaled = [value / total for value in one]
            expect(tasking.distance(scaled, other) < 0.05, f"NONE gives {one}, SOFTMAX {other}")


def _order(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=values.__getitem__)


@case(
    "score.normalization_unadvertised",
    "A normalization that is not advertised is INVALID_ARGUMENT.",
    "SCO-03",
    needs=[needs.SCORE],
)
async def normalization_unadvertised(ctx: Context) -> None:
    advertised = set(_offers(ctx).normalizations)
    if not advertised or {NONE, SOFTMAX} <= advertised:
        skip("the normalizations are not reported, or all of them are")
    for value in {NONE, SOFTMAX} - advertised:
        await _reject(ctx, _request(ctx, [_group(ctx)], Options(normalization=value)), "normalization")


@case(
    "score.instruction",
    "An instruction is served where advertised and rejected by name elsewhere.",
    "SCO-04",
    needs=[needs.SCORE],
)
async def instruction(ctx: Context) -> None:
    request = _request(ctx, [_group(ctx)], Options(instruction="Judge how well the document answers."))
    if not _offers(ctx).supports_instruction:
        await _reject(ctx, request, "instruction")
        return
    with_instruction = await tasking.run(ctx, tasking.SCORE, request)
    plain = await _score(ctx, [_group(ctx)])
    expect(_values(with_instruction) != _values(plain), "an instruction changes no score")


@case(
    "score.semantics_unadvertised",
    "Semantics and granularities that are not advertised are INVALID_ARGUMENT.",
    "TASK-03",
    needs=[needs.SCORE],
)
async def semantics_unadvertised(ctx: Context) -> None:
    if known := set(_offers(ctx).semantics):
        for semantics in set(tasks_pb2.TaskValueSemantics.values()) - known - {0}:
            await _reject(ctx, _request(ctx, [_group(ctx)], Options(output_semantics=semantics)), "semantics")
    if sizes := set(_offers(ctx).granularities):
        for granularity in set(tasks_pb2.TaskOutputGranularity.values()) - sizes - {0}:
            await _reject(ctx, _request(ctx, [_group(ctx)], Options(granularity=granularity)), "granularity")


@case("score.limits", "More groups or labels than reported are rejected.", "CAP-03", needs=[needs.SCORE])
async def limits(ctx: Context) -> None:
    codes = (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED)
    offers, tried = _offers(ctx), False
    if 0 < offers.max_groups <= LARGEST:
        groups = [_group(ctx, f"group-{number}", 1) for number in range(offers.max_groups + 1)]
        await _reject(ctx, _request(ctx, groups), "groups", *codes)
        tried = True
    if 0 < offers.max_label_token_ids <= LARGEST and offers.supports_label_token_scoring:
        labels = list(range(offers.max_label_token_ids + 1))
        await _reject(
            ctx, _request(ctx, [_group(ctx)], Options(label_token_ids=labels)), "label_token_ids", *codes
        )
        tried = True
    if not tried:
        skip("no limit is reported, or it is too large to try")


@case(
    "score.candidates_differ",
    "Each candidate is scored for itself: the same one scores the same, another one otherwise.",
    "SCO-07",
    needs=[needs.SCORE],
    exclusive=True,
)
async def candidates_differ(ctx: Context) -> None:
    batch = [tasking.item(ctx, "a", 0), tasking.item(ctx, "b", 4, words=9), tasking.item(ctx, "c", 0)]
    group = tasks_pb2.ScoreGroup(group_id="g", query=tasking.item(ctx, "query", 5), candidates=batch)
    one, other, same = _values(await _score(ctx, [group]))[0]
    expect(one != other, "two different candidates have the same score")
    expect(tasking.distance(one, same) < 0.02, f"the same candidate scores {one} and {same}")
