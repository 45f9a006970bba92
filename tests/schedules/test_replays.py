"""A number, or the word that a failed schedule prints, is all that it takes to see its run again."""

import os
import re
import subprocess
import sys
from unittest.mock import patch

import msgspec
import pytest
from tests.schedules.test_membership_schedules import job, run_survivable, soak

from regrow.cli import main
from regrow.core.errors import UsageError
from regrow.core.ids import Rank, StepNo
from regrow.core.messages.orders import FenceWorker, SpawnWorker
from regrow.core.messages.vocabulary import Role
from regrow.core.records import IncidentClosed, JobEnded
from regrow.membership.recovery.stopping import Stopping
from regrow_lab.sim.draws import draw, draw_replacing
from regrow_lab.sim.faults import SimFault, SimRequest
from regrow_lab.sim.invariants import InvariantBroken
from regrow_lab.sim.network import NetworkConditions
from regrow_lab.sim.schedule import Promised, SimSchedule, replay_lines
from regrow_lab.sim.script import Doing, SimScript

PRINTS = """
from regrow_lab.sim.draws import draw
from regrow_lab.sim.schedule import replay_lines
for number in range(25):
    print("\\n".join(replay_lines(draw(number))))
"""
BROKE_ONCE = (
    "schedule:"
    "eNptVD2P5EQQ9RwBhAT7AzZAIkaQ7_ADuJC0Kbtr7MbtbqurfXNDBAixIkDshRCtGHs8sztzhy68aOSJkHUJRCSInw"
    "A5ElTbs7OLRCdWVXV9vffalzWVmPwevbf81MZLUkVjSmeTSWOsRHpjTR6MjBf0aDUHV_isiSul_U0BT8UMKu3p9btv"
    "r-bKSDvvp9vzKJxtiDrkVOdp38rKQazxsPSQXm_HMgIoR9ntMtBeSASplcF--kE0FsjApMKrAm3l9zeDNdPWun768e"
    "fDjd3MuuJB4tej-3mYTj7wu_14_Qk6qRIvUgcJ9hd_jn1u40rKhUCOLqKtVCnPfLQaqKTyh4bBsLPudvgIbppTt8qQ"
    "p866FWpMPB3aufIGiXibISCSDJOcrl6Qd5CmGp0gjyWdvXRYau4vTgHqXpK3pbBGSMV9UzQJdmuHc6c80mE3lAp9hQ"
    "HTbU1VgIgZbWXS6022kA68sqYlm-ToaaNtKlylka5uvVOgx8bRTSBTaARiSN4Zd98NvnukvhyR-mnoWFpljkj0F3-M"
    "CS8eRHLE8lEbEiHFr35U8jrI57odKEfZR8fTgrQlO65ui4qhZU1UBXZ1ZZSfbAtlREBEJUD7o2aOVkPqM15imwTqUZ"
    "RQ8eR3RZ_zIk_-Z_SbwnKPQbfRikpwwzdxqvTfNpXxSp9tmapMEJPFqB0GLcuTGtrEFmXlWR6_fR_OD6uqlBDszWi3"
    "I-Ds-Hl0NDDz6PqLX98fzrpkNgKD_fS76VByGVfpvinDO4ja1CIx010zA6Xpn9WwBr-POYLP0F02EjUw3p_EH_3y1-"
    "bvmjS_qROSwRLxop--NTpYJCUnPgC71rz_ydpoDgp8qvw9g5YJ9ZCzeMbAfXFWS4707HKZ2XkdQK8dmDxqJNOdrmfK"
    "KMpQLo3PJsel7-ZoNJCnfqqOQ8SQ5KeHzH8GzqNn39TzDHwdtH6Xfpa_-eEXvV_fcT6pA3PR0HffjO90-vjYg5f3fO"
    "M_tbkaLPY1IcrXk1ctv9BCEe4YyvMw0nmQ_r8VZ_Bd"
)
"""A stop that waits for its checkpoint while the next one on schedule falls due: the timer had nothing to wait for."""
BROKE = {
    "an agent reports so late to the next coordinator that it is ordered to stop, and all start again": (
        "schedule:eNptUz1v1EAQNUlDQUHBD6BAokaiz_0BWtpl7J2zF693rZ11LkeFEJAKEUqoTtz5LveRBOUXnJwKWWnoaPgN0FMwto_"
        "LIbGNNTOefTPvvX0zoRyjH8Gj8XMbjkllpcmdjfZKYyXS_il5MDIcUjAdgMt8UoaF0n6RwZHoQ6E9XT-8Ox0oI-2g7q3uB81ZNVW"
        "H3Oo8rWeycBBqrMYe4tGqu0YApSirswS0FxJBamWw7j0OugsSMLHwKkNb-PWijfraWlf3nr5s_zjrW5ftNL7t0ufNdHIn79bd74f"
        "opIq8iB1EWB_87HCWYSHlUCBXh8FKqphn3kQlFFL5q5LJsP1q2X4Eg6ZUTRPkqZNqihojT1ezgfIGiXibtiCiBKOUTi7IO4hjjU6"
        "Qx5zuXTrMNeOLbYGqS_I2F9YIqRg3RhNhdepw4JRHujprr2pwhQFTrUyRgQiZbWXi0TwZSgdeWTMjG6Xoaa5tLFyhkU6W3inQHXC"
        "waMQUGoGYkgfd7mdt7oapVx1TX1rE3CqzYaIONudip5Ii5nuzphFifP1ZyVFjn9GslRzltmcG0uacOFlmBVPLnigyrCaFUX5vlSk"
        "jGkZUBLTeeGYTlaRe8BKrqJEeRQ4FT_730nNe5PA_oy8yyxitb4Mp5cBot6YUOZX7d2VhvNJ3VixVIojFYtauWi_L-uDrx-Z8mkU"
        "2ywvP9vjeJaZFLqGJ55sfOsJx21FC36Pb2uk0ZzUaBeve-16bGYdFvC7z5h0Es9gisdJV2QelecR2DX4fAwSfoDsuJWoY1gfPwif"
        "ffs1_T0jzm9piN5EIh3VPbcCYLG7cIXuief9tNNdcFHikblIXlgX1kLJ5_i2wbk6lSB-Ox4kdLCN-aeww8NZNHJg0KCWrHq_Hxif"
        "7m517t7vWUgN52k41CSFKt4RMCFFe7w_-AIJPxTw="
    ),
    "a node is given back while the job is stopping": (
        "schedule:eNqFU72P1EYU9wYqKgr-AKQgJW0URHsrpQ4l7fDseWsPO54ZzRuzbEQRRflQiiindKQ65ez17d3eHaJMtfJWkUWTVGk"
        "QNRX0SOTZ3luOKFKmGb3v936_974ryWHyIvrs8IGND0nllXHeJqPKWIl05YgCGBnPKVrMwOchq1XurA90nMMjMYFCB3r-yfXFTBl"
        "pZ-14dTPq3qqzeuRgdl3XsvAQa9wcBkgPVkMiATRF2ZxmoIOQCFIrg-34djQkyMCkIqgcbRHWx7000db6dnzv697jdGJ9finw-0F"
        "9FhdKy0t6vx7cH6KXKgki9ZBgu_d6qHMSF1LOBbJ1Hq2kSrnnrVRBIVXYVAyHnTQn_Se46JSaRYbcddYsUGMSaFPPVDBIxNP0BpF"
        "kmExp_5yChzTV6AUFdHTjmUenub7YGah5RsE6YY2QiuumaBJsjjzOvApIm9M-VVdXGDDNyhQ5iJjRViY9WGZz6SEoa2qyyRQDLbV"
        "NhS800v5J8Ar0UDg67ugUGoEYklvD7Ke97j1S3wxIPe0rOqvMFol2PPhH55csU0T3Ud0FQorf_qbkQbdAB3VPOcp2GxLVIK1jxf5"
        "JXjC0vBNFjk1ZGBVGq1wZ0SGiEqD1dme2UkXqKx5ilXTUo3BQcOcXSc94kIf_0fpxbrlGv7nRghxwtdGCEq9c-KkqTFD60xVTlQl"
        "ishi1TdVvS7v3x5Pu_VonNndF4PX4e1AsCiehk5dbhwFw3EVUMAno272_Pu_fkWM2Ogbb8c8Daodxka4r191BVKcWiZluqgkozS3"
        "2Y_B9zBBChv6HSqKGebt3P_7yzzfLtyVpvqkdkp0kYqbjxqDgJXEceAnsUvP8O2mp2SjwkXqvOrdMaIApL8-HBj5gypB--bGcZRB"
        "qUqkBTRfTvbv2-5P8i8dHF-yMyg7jqPRgputqe1Evh0wVtxnYI4Zkujvnktdivh6SV4ygMrvUd87evrp2_V-pRx-kHt_939QlIcr"
        "nVz_-BzHN720="
    ),
    "a stop comes while agents report to the next coordinator, which restarts all first": (
        "schedule:eNp9VD2P5EQQ9SwiIyC4gHADpIsR5Os_ACFpU3bX2H1ud1td7ZsbohNCrAgQCxlEK8Ye7-zM3KH7BSNPhKxLICJB_AT"
        "ICSh_zN4EiE5mqqq7Pt575euKCoz_CD5YPbHRilRem8LZeFYbK5Eu7siDkdGSZusFuNynjcoL6zzd5_BMzKHUnl4_fne9UEbaRRf"
        "uLoP-7PqoQ37MVw-NLB1EGo8rD8ntbkwkgDKU7T4F7YVEkFoZ7MKPgjFBCiYRXuVoS3-4H6y5ttZ14afPhxv7uXX52cOvRveLqFR"
        "anvndYbz-FJ1UsReJgxi7q7_GOtuolHIpkKPLYCdVwj1PVg2lVP5YMxx23m6HH8FFM2rXKXLXabtGjbGnY7NQ3iARTzMERJxinNH"
        "NS_IOkkSjE-SxoEevHBaa64uHALWvyNtCWCOk4roJmhjbO4cLpzzScT-k6usKA6bdmTIHETHayiS3m3QpHXhlTUM2ztDTRttEuFI"
        "j3Wy9U6DHwsF9T6fQCMSQvD_Ovh98b5D6YkTq56FiYZWZkOiu_hwfvDyLZIjFRdM_hAS__EnJ215At81AOcoumE4D0hbsuNnmJUP"
        "LmihzbKvSKD_b5cqIHhEVAx0mzUxWTepzHmIX99SjKKDkzk9JX_AgT_-j9fvcco1BucGaCuBqszXFThX-m7o0Xul3dkxVKojJYtS"
        "O9aCWLjw1G9u8KD3L4_cf-vPjuiwk9PZmtJsRcHb8MjpqmHt03dVvHw7nrmA2ega78Nsx6Soqk0Nd9HsQNIlFYqbbeg5Kc4vDGLw"
        "fCwSforuuJWpgvD-LPv71780_FWneqQcke0tEyy58NDpYJAU_PAO70jz_g7XRHBT4TPkuvJwYtEyoh4zFMwbeJGe1ZEjfX69Su6h"
        "BW4OVA5MFtWS-k82IDP9bGZ9eTGOfXtcayFMXqqmNCOLsAdQh4zbm3WXNgrfuPO_dAPCU9q0pbfje_6Q9bS5_cihF-u7rapGCb0g"
        "lBjSdMjye-DjpaVb1qgiG0od6_AaEn0xlGFjPN8aupw9QxUJeHipClK_fft7w9ueKcM80XfZdXfZr9S-_og4L"
    ),
    "a node is given back in a job whose newcomers are refuted, and its agents have no memory for the state": (
        "schedule:eNp9VD2P5EQQ9Q6ImOB-AAHSkSLId_4AyQWkTdldY_e53W11de_cECGE7kSAWMggWjFje2d39hZddtnIEyHrEohIED8"
        "BcgLKHzu3IEQnM1XV9fXeaz_dUInJb9H768c2XpMqKlM6m8wqYyXSm5fkwch4RVG9BFf4rIqD0v6qgCdiAUF7evXw7XqpjLTLbr5"
        "7J-rPro865FTnad_I4CDWeFh7SC92YxkBlKNsbzLQXkgEqZXBbv5hNBbIwKTCqwJt8PurwVpoa103__iz4cbNwrriXuLT0f28n07"
        "e87v9eP0MnVSJF6mDBLvTP8Y-13GQciWQo6toJ1XKM09WBUEqf6gYDLtor4cfwU1zausMeeqsrVFj4unQLJU3SMTbDAGRZJjkdH5"
        "L3kGaanSCPJb04IXDUnN_cQxQ-4K8LYU1Qirum6JJsL10uHTKIx1uhlJ9X2HAtDsTChAxo61MerHNVtKBV9Y0ZJMcPW21TYULGun"
        "82jsFemwcXfVkCo1ADMm74-43g-81Up-PSP04dCytMhMS3Xy8H93ei-SI5azpEyHFL35Q8qKXz0UzUI6ym1KiBqQt2XF-XQSGljU"
        "RCmw3wSh_siuUET0iKgHaT5qZrIrUp7zELumpR1FC4Mnvij7nRc7-Y_SrwnKPQbdRTSVwt1lNiVOl_6oKxiv93o6pygQxWYzaYdC"
        "yPKqhSWxRBs_y-PW7_nxfh1JCb29HuxkBZ8dPo6OChUfXnf7ywXAuS2ajZ7Cbfz2ito5Duq_K_h3MmtQiMdNttQClecRhDX4fSwS"
        "foXtWSdSw6k4_iT_6-c_tXxvS_KaOSPaWiJmOB6ODRVJy4j2wN5r3P1pbzUGBT9Rr161lQj3kLJ5_Bpg3p3Kkb5-tM7usQFuDGwc"
        "mP6kk851yLxkS_rM2Pntr2vouudJAnrq5mqaIIcmPL3koWBdYWLcaKs7GivWZ9f-qd_pyAvX_6vGnhjKkb77cLDPwFdOhzJQ_fzi"
        "xcKeik02vhTeGtvtqevm_T0MznJ5vDMWPALJ8V_sNIcpXq0d_A_2_A4U="
    ),
    "an order to forget copies is repeated after newer ones are kept, and all start again from the disk": (
        "schedule:eNq1VL-P3EQU9u5JgBAFRQrKICEhQRVCmjS3NCAaCoRoQIzGnrf24PGMNTO-zYYmoCMRBeKkKEWCkE6svd693bug_AW"
        "Wt0LmKioaBAWioaCj5fnHbjbR6aSTYBp75s373nvf997cTk0M3q_Olcmnyp0YHmUy1srrZ1IxMDszY6lk7tj0pyOqIxvkPIqVtuY"
        "oojfIkCbCmtNXX5yOuGRqVA2Wl516LWurBnTGq0XOEk1dAauJpf7hsgUi1ITAyuOACksYUCa4hGrwptMCBFT6xPIIVGKLo2Y3FEr"
        "pavDhrebG8VDpaMvxdnt84iZcsK1zXbTX90Az7lnia-pBtft3G2fhJoyNCaB17CwZ9zHnbpfRhHG7ypAONSwXzYdg0NCU0wAw66C"
        "cggDPmlU-4laCMVhNYyBeAF5oDh4aq6nvC9DEWIjNpUcaYoHxycZgykfGqpgoSRjHuD5ID8qZhpHmFszquIGq4xJJZbmUSUSJi2x"
        "z6R_OgzHT1HIlc6O8EKyZC-UTnQgwBwurORVtYOeolpMIoAYpeaWt_bg5e8zUFy1TPzQRY8Vlx0Q1aO87D7csIUDcz2tH6sP-95w"
        "d1g10mDeSA6s6FyenTMV4cLCIEqQWeyKJoEwTyW1_GXFJaka4R03R9Uy3ywy_iUUsvVp6IDFNMPM16AkWsndG6keRwhhN5zpTE1O"
        "M1psaT_PYfp0l0nLxwhKlCohBsZC1VdZ0y6bA3FNRnFhsj1_u1-vBNIkZrffzdp-3hOPBj-1BRocWdLX789VmzWJUo1awGnzTgk7"
        "cxC-yuJ6Dfu4rMKh0mQ0pF5hiUwbOxwioDUDfyRgIOt6UmRqBM7WJXe-Ii3I815qxSWJ0RLJ3__qpXqepwPo37nOBRgI3uK0Glzs"
        "FFQpqaYjN0xo2MmFD8hDMvTuTQI0yKpSEVFMZOhlDvf15ywz-TaQN-l3Za-9MUGNNNeBd3i71wg2pDWIaciG2Aad7ao22syZx_-b"
        "v75xc-uwiaDsdWv2KAKvRnlmj_XZObs65aE8W--yFi114-FDhgFKrdINbtLizppue4vD8qrvnEN9XE6A6X6WjgNo0Qhk798FrH92"
        "7-_Lrb8zWk9NL6_53urjtazd4r0sdW8jijSewUxzZcXEGcu-D999-q7j6PyC_dG3v-Wv6-lPIvf8C-Z93r39c7J-J3LsocoazzuV"
        "apz8__-OTb7-8dW7Sm6bbhn48zjV0agDY6XfyXxzC6tQ="
    ),
}
"""Each broke a law once, by a defect of the protocol or of the law."""
FORBIDDEN = job(2, max_faults=0)
KILL = SimFault("kill", rank=Rank(1), doing=Doing.COMPUTING)


def test_replays_print_the_same_in_processes_that_order_sets_in_other_ways() -> None:
    printed = [
        subprocess.run(
            [sys.executable, "-c", PRINTS],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    ]
    assert printed[0].count("ended with code") == 25
    assert printed[0] == printed[1] == printed[2]


def test_a_stop_that_waits_for_its_checkpoint_leaves_no_deadline_behind() -> None:
    assert list(replay_lines(SimSchedule.of_code(BROKE_ONCE)))[-1].startswith("ended with code 75")


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_stop_during_a_restart_from_memory_waits_until_the_ranks_have_brought_the_state_to_disk(late: bool) -> None:
    """Only the agents have it, so the workers are started; a fault after the stop starts none again."""
    wrong = [
        SimFault("refuted", Rank(0), Doing.COMPUTING, nth=2),
        SimFault("kill", Rank(1), Doing.REDUCING, nth=5),
        *([SimFault("kill", Rank(2), Doing.BUILDING, nth=4, after=0.5)] if late else []),
    ]
    schedule = SimSchedule(
        job(2, nodes=2, durable=True, checkpoint_every=60.0),
        SimScript(until=StepNo(20), build=1.0),
        NetworkConditions(late_exit=8.0),
        injected=wrong,
        requests=[SimRequest("stop", 6.0, grace=30.0)],
        seed=1,
    )
    end = schedule.run(world := schedule.world())
    started = [order for _, order in world.log if isinstance(order, SpawnWorker) and order.role is Role.RANK]
    assert (end.code, len(started)) == (75, 8)
    assert world.disk.durable >= 4 if not late else "is not started again" in end.diagnosis


def test_state_for_which_the_agents_have_no_memory_goes_to_disk_before_all_start_again() -> None:
    """If newcomers are refuted, all start again from the step that they had and not from an older checkpoint."""
    wrong = [
        SimFault("refuted", Rank(0), Doing.COMPUTING, nth=2),
        SimFault("kill", Rank(1), Doing.REDUCING, nth=5),
        *(SimFault("memory", Rank(rank), Doing.COMPUTING) for rank in (0, 2)),
    ]
    spec = job(2, nodes=2, durable=True, checkpoint_every=60.0)
    schedule = SimSchedule(spec, SimScript(until=StepNo(20)), injected=wrong)
    schedule.run(world := schedule.world())
    (closed,) = (line for _, line in world.log if isinstance(line, IncidentClosed))
    assert (closed.rung, closed.steps_lost) == ("restart", 0)


def test_a_job_that_ends_waits_a_limited_time_for_a_slow_rank_and_saves_the_state_of_the_others() -> None:
    slow = SimFault("slow", Rank(1), Doing.COMPUTING, nth=3)
    killed = SimFault("kill", Rank(0), Doing.REDUCING, nth=3)
    spec = job(3, max_faults=0, durable=True, checkpoint_every=60.0)
    schedule = SimSchedule(spec, SimScript(until=StepNo(6)), injected=[slow, killed])
    assert schedule.run(world := schedule.world()).code == 75
    assert any(isinstance(order, FenceWorker) and order.dump_stacks for _, order in world.log)
    assert world.disk.durable == 2


@pytest.mark.parametrize("why", BROKE)
def test_found_schedules_break_no_law(why: str) -> None:
    SimSchedule.of_code(BROKE[why]).run()


def test_a_stop_has_time_enough_to_save_only_if_no_message_is_slow() -> None:
    """A checkpoint of several parts needs a chain of messages, of which a slow network delays each by seconds."""
    draw_replacing(8459).run()


def test_a_machine_that_starts_all_again_after_a_stop_breaks_the_law() -> None:
    late = SimFault("kill", Rank(0), Doing.BUILDING, after=0.5)
    with (
        patch.object(Stopping, "requested", lambda *_: None),
        pytest.raises(InvariantBroken, match="no restart is decided for a job that was asked to stop"),
    ):
        SimSchedule(job(2), injected=[late], requests=[SimRequest("stop", 0.2, grace=30.0)]).run()


def test_what_a_schedule_that_fails_says_shows_its_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvariantBroken) as failed:
        run_survivable(FORBIDDEN, NetworkConditions(), [KILL], 7)
    (said,) = failed.value.__notes__
    words = re.search(r"regrow (sim replay \S+)$", said)
    assert words is not None, said
    assert main(words[1].split()) == 1
    seen = capsys.readouterr().out.splitlines()
    assert seen == list(replay_lines(SimSchedule.of_code(words[1].split()[-1])))
    assert seen[-1].startswith("BROKEN: InvariantBroken: the job did not come to its last step")
    assert any('"type":"WorkerExited"' in line for line in seen)


def test_a_number_is_a_schedule_and_a_schedule_is_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(200):
        assert SimSchedule.of_code(draw(number).code) == draw(number)
    assert main(["sim", "replay", "11", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=SimSchedule) == draw(11)
    assert main(["sim", "replay", "11"]) == 0
    assert capsys.readouterr().out.splitlines() == list(replay_lines(draw(11)))


@pytest.mark.parametrize("code", ["schedule:", "schedule:AAAA", "kill", "-3"])
def test_a_word_that_is_none_is_refused(code: str) -> None:
    with pytest.raises(UsageError, match="is not a schedule"):
        SimSchedule.of_code(code)


def test_a_run_in_which_a_promise_is_broken_is_told_from_one_in_which_nothing_was_promised() -> None:
    allowed = SimSchedule(FORBIDDEN, injected=[KILL])
    assert allowed.run().code == 75
    assert list(replay_lines(allowed))[-1].startswith("ended with code 75")
    with pytest.raises(InvariantBroken):
        msgspec.structs.replace(allowed, promise=Promised.THE_LAST_STEP).run()


def test_schedules_by_number_come_to_what_they_must() -> None:
    for number in range(100):
        draw(number).run()


def test_a_job_whose_only_worker_builds_is_not_struck_by_a_hang_that_nobody_could_see() -> None:
    """Another one lives on without its agent, and is none of the job any more."""
    draw(1_004_144).run()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_schedules_by_number() -> None:
    for number in range(100, 100 + max(10_000, soak())):
        schedule = draw(number)
        schedule.run(world := schedule.world())
        assert sum(isinstance(line, JobEnded) for _, line in world.log) == 1, number
