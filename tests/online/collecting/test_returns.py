from replaylake.online.collecting.returns import RecentReturns
from replaylake.online.collecting.step_buffer import EpisodeEnd


def ends(number, **returns):
    return [EpisodeEnd(number, number, ret, 3, agent) for agent, ret in returns.items()]


def test_a_game_returns_what_its_agents_do():
    last = RecentReturns(2)
    for number in range(3):
        last.add(ends(number, ann=number, bob=10.0))
    assert list(last.sums) == [11, 12]
    assert last.metrics() == {"return/ann": 1.0, "return/bob": 10.0}
    assert not last.may_be_zero_sum


def test_one_agent_is_no_game():
    last = RecentReturns()
    last.add([EpisodeEnd(0, 0, 0.0, 3), EpisodeEnd(1, 1, 0.0, 3)])
    assert list(last.sums) == [0, 0]
    assert last.metrics() == {}
    assert not last.may_be_zero_sum


def test_zero_sum_is_said_once_somebody_has_won_and_until_a_sum_is_another():
    last = RecentReturns()
    last.add(ends(0, ann=0.0, bob=0.0))
    assert (last.may_be_zero_sum, last.is_zero_sum) == (True, False)
    last.add(ends(1, ann=0.1 + 0.2, bob=-0.3))
    assert last.is_zero_sum
    other = RecentReturns()
    other.load_state_dict(last.state_dict())
    assert other.is_zero_sum
    assert list(other.sums) == list(last.sums)
    other.add(ends(2, ann=1.0, bob=1.0))
    assert not other.may_be_zero_sum
    # For good: a hundred more of the others would change nothing.
    other.add(ends(3, ann=1.0, bob=-1.0))
    assert not other.may_be_zero_sum
