"""Tests of the full matrix alone: their like is in `make test`, which proves each seam and stage once.

A name without brackets stands for all cases of a test, `ALL` for all tests of a file. Durations: docs/tests.md.
`python -m tests.tiers` names the files that have such tests: a run of these alone needs to read no others.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

ALL = ("",)
_MARK = "pytest.mark.full"

FULL: dict[str, tuple[str, ...]] = {
    "tests/unit/comm/test_comm_device_mesh.py": (
        "test_they_become_what_they_would_have_been_in_that_world[worlds0]",
        "test_they_become_what_they_would_have_been_in_that_world[worlds3]",
    ),
    "tests/unit/train/test_microbatches.py": (
        "test_no_more_than_log2_gradients_are_kept_beside_the_present_one[32]",
        "test_no_more_than_log2_gradients_are_kept_beside_the_present_one[13]",
        "test_no_more_than_log2_gradients_are_kept_beside_the_present_one[8]",
    ),
    "tests/process/test_judging.py": ("test_a_job_that_is_wrong_after_a_kill_and_ends_with_0_is_found[the harness]",),
    "tests/schedules/test_membership_schedules.py": ("test_more_schedules",),
    "tests/schedules/test_election_schedules.py": tuple(
        f"test_a_hundred_elections_by_number[{hundred}]" for hundred in range(5, 10)
    ),
    "tests/schedules/test_elastic_schedules.py": ("test_more_schedules_of_changing_worlds",),
    "tests/cluster/test_operator_trains.py": ALL,
    "tests/slurm/test_slurm_commands.py": ALL,
    "tests/slurm/test_slurm_trains.py": (
        "test_elastic_replicas_leave_for_a_job_of_higher_priority_come_back_and_one_that_is_cut_off_never_commits",
        "test_a_killed_node_is_replaced_at_once_elsewhere_and_drained_where_the_job_asks_for_it",
        "test_the_loss_of_the_batch_host_leaves_nothing_and_the_gang_starts_anew",
    ),
    "tests/process/test_unkept.py": ("test_what_is_not_carried_is_named_and_nothing_else[2]",),
    "tests/process/test_exchanged.py": (
        "test_an_optimizer_that_nobody_protects_and_that_steps_late_ends_no_job",
        "test_code_that_a_step_puts_there_ends_no_job_and_after_a_kill_all_start_again[own-function]",
        *(
            f"test_data_that_steps_exchange_in_a_class_comes_through_a_kill[{case}]"
            for case in ("tuple", "list", "tensor", "new", "alone")
        ),
    ),
    "tests/process/test_set_up.py": (
        "test_who_takes_a_rank_hears_what_that_rank_has_heard[every kind, standbys]",
        "test_who_takes_a_rank_hears_what_that_rank_has_heard[every kind, standbys before the script]",
        "test_who_takes_a_rank_hears_what_that_rank_has_heard[alike, standbys]",
        "test_what_a_lost_node_has_heard_is_known_elsewhere",
        "test_a_grown_world",
        "test_a_newcomer_that_calls_something_else_is_refused_by_line",
        "test_large_answers_come_in_pieces_and_parameters_need_none",
        "test_when_all_start_again_they_speak_again",
    ),
    "tests/process/test_shadow_kills.py": (
        "test_a_kill_in_the_middle_of_a_proof_costs_nothing_and_the_proof_is_made_again[a third rank-shadow]",
        "test_a_kill_in_the_middle_of_a_proof_costs_nothing_and_the_proof_is_made_again[a third rank-offered]",
        "test_a_kill_in_the_middle_of_a_proof_costs_nothing_and_the_proof_is_made_again[the prover-offered]",
        "test_a_kill_in_the_middle_of_a_proof_costs_nothing_and_the_proof_is_made_again[the proven rank-offered]",
    ),
    "tests/process/test_shadow_parallel.py": (
        "test_a_standby_for_each_part_is_proven[ddp-1]",
        "test_a_standby_for_each_part_is_proven[fsdp2-4]",
        "test_a_standby_for_each_part_is_proven[tp_dp-2]",
        "test_a_standby_for_each_part_is_proven[tp_fsdp-4]",
        "test_micro_batches_are_proven[-hsdp]",
        "test_micro_batches_are_proven[--invariant-ddp]",
        "test_micro_batches_are_proven[--tokens-ddp]",
        "test_micro_batches_are_proven[--tokens-hsdp]",
        "test_micro_batches_are_proven[--invariant-hsdp]",
        "test_a_standby_of_a_larger_world_is_proven_in_a_smaller_one",
    ),
    "tests/process/test_shadow_proof.py": (
        "test_a_standby_of_a_script_that_keeps_nothing_is_proven_and_training_is_not_disturbed[seeded]",
        "test_what_a_newcomer_would_compute_in_another_way_is_found_and_its_cause_named[statistic-`augment.mean`]",
        "test_what_a_newcomer_would_compute_in_another_way_is_found_and_its_cause_named[number-total`]",
        "test_what_a_newcomer_would_compute_in_another_way_is_found_and_its_cause_named[clock-time.monotonic()]",
        "test_what_a_newcomer_would_compute_in_another_way_is_found_and_its_cause_named[environment-os.environ['GAIN']]",
        "test_what_a_newcomer_would_compute_in_another_way_is_found_and_its_cause_named[file-`augment.text`]",
        "test_what_a_newcomer_would_compute_in_another_way_is_found_and_its_cause_named[rank-`early_rank`]",
        "test_what_a_newcomer_would_compute_in_another_way_is_found_and_its_cause_named[module-forwards`]",
        "test_what_a_newcomer_would_compute_in_another_way_is_found_and_its_cause_named[memoized-made_once]",
        "test_a_standby_of_a_script_that_keeps_nothing_is_proven_and_training_is_not_disturbed[closure]",
        "test_a_standby_of_a_script_that_keeps_nothing_is_proven_and_training_is_not_disturbed[counter]",
        "test_a_standby_of_a_script_that_keeps_nothing_is_proven_and_training_is_not_disturbed[clip]",
        "test_a_generator_that_nobody_protects_is_refused_before_the_first_step[torch_generator-augment.torch]",
        "test_a_generator_that_nobody_protects_is_refused_before_the_first_step[python_generator-augment.python]",
    ),
    "tests/process/test_forked_proof.py": (
        "test_one_is_forked_proves_a_rank_and_is_gone_while_the_job_trains_on",
        "test_a_rank_that_dies_while_one_is_made_is_mended_as_ever_and_the_other_is_ended",
        "test_a_script_that_fails_in_one_is_told_of_and_fails_nothing",
        "test_of_a_rank_alone_none_is_made",
    ),
    "tests/process/test_batch_tables.py": ("test_a_table_that_changes_before_its_columns_are_written_stops_the_batch",),
    "tests/process/test_batch_stubs.py": ("test_others_alone", "test_others_beside_a_sound_one"),
    "tests/process/test_batch_trust.py": (
        "test_whatever_ends_nothing_is_left_of_a_server_nor_of_the_engines_that_it_has_forked[a worker]",
        "test_whatever_ends_nothing_is_left_of_a_server_nor_of_the_engines_that_it_has_forked[nobody]",
    ),
    "tests/process/test_batch.py": (
        "test_ten_thousand_rows_with_five_kills_of_the_head_take_little_longer",
        "test_workers_come_and_go_by_the_file_and_by_commands",
        "test_workers_that_it_starts_itself_are_replaced_and_end_with_it",
        "test_a_signal_has_the_list_read_at_once_even_where_it_seems_unchanged",
    ),
    "tests/process/test_batch_registered.py": (
        "test_a_head_that_is_killed_and_started_again_finds_its_workers_and_not_those_that_died",
        "test_who_is_drained_at_the_head_ends_and_one_that_ends_by_itself_says_so",
        "test_a_command_that_names_the_head_starts_workers_anywhere",
        "test_rows_that_outlast_the_grace_go_elsewhere",
    ),
    "tests/process/test_batch_serve.py": ALL,
    "tests/process/test_succession.py": (
        "test_training_goes_on_without_the_node_that_hosted_the_coordinator[the_host_is_without_power]",
        "test_training_goes_on_without_the_node_that_hosted_the_coordinator[the_launcher_is_killed]",
        "test_coordinators_are_lost_one_after_the_other",
        "test_the_node_of_a_coordinator_is_given_back",
        "test_a_coordinator_that_is_only_paused_keeps_its_office_while_nobody_needs_it",
        "test_a_coordinator_that_was_paused_at_a_fault_finds_another_in_its_place_and_comes_back_as_a_node",
    ),
    "tests/process/test_coordinator_fails.py": tuple(
        f"test_training_goes_on_and_ends_the_same[{case}]"
        for case in (
            "while all build",
            "as the first generation is formed",
            "between faults",
            "at a death, before anything is done",
            "as a survivor has halted",
            "as the newcomer is ready",
            "as the last step is done",
            "as the job ends",
        )
    ),
    "tests/process/test_goodput_run.py": (
        "test_the_account_of_a_run_with_kills_adds_up_and_agrees_with_the_plan[20-120]",
    ),
    "tests/process/test_comm_collectives.py": (
        "test_every_collective_answers_as_gloo_does_and_with_the_same_bits_each_time[2-False]",
        "test_every_collective_answers_as_gloo_does_and_with_the_same_bits_each_time[3-False]",
        "test_a_script_on_torch_distributed_finds_the_same_on_regrow_as_on_gloo[18-False]",
        "test_every_collective_answers_as_gloo_does_and_with_the_same_bits_each_time[3-True]",
        "test_all_groups_of_a_script_answer_as_gloos_do_when_new_when_formed_again_and_while_alone[built together]",
    ),
    "tests/process/test_comm_parallel.py": (
        "test_a_step_given_up_at_any_of_its_collectives_runs_again_with_the_same_bits[ddp]",
        "test_a_step_given_up_at_any_of_its_collectives_runs_again_with_the_same_bits[tp_dp]",
        "test_a_step_given_up_at_any_of_its_collectives_runs_again_with_the_same_bits[tp_dp --tp-fsdp]",
        "test_a_step_given_up_at_any_of_its_collectives_runs_again_with_the_same_bits[hsdp --checkpoint-activations]",
        "test_a_step_given_up_at_any_of_its_collectives_runs_again_with_the_same_bits[tp_dp --checkpoint-activations]",
        "test_so_it_does_where_torch_cannot_reset_fsdp_itself[fsdp2]",
        "test_so_it_does_where_torch_cannot_reset_fsdp_itself[tp_dp --tp-fsdp]",
        "test_so_it_does_where_torch_cannot_reset_fsdp_itself[hsdp --checkpoint-activations]",
        "test_a_newcomer_that_was_built_alone_takes_a_lost_rank_in_all_its_groups[hsdp-1]",
        "test_a_newcomer_that_was_built_alone_takes_a_lost_rank_in_all_its_groups[tp_dp-3]",
        "test_a_newcomer_that_was_built_alone_takes_a_lost_rank_in_all_its_groups[pp_dp-0]",
    ),
    "tests/harm/test_harm.py": ("test_a_habit_of_the_world_is_trained_the_same_or_refused",),
    "tests/harm/test_elastic_habits.py": ("test_a_habit_comes_through_a_change_of_the_world_or_has_a_fixed_size",),
    "tests/process/test_sim_foretells.py": ALL,
    "tests/process/test_try.py": (
        "test_a_script_that_counts_for_itself_differs_and_is_told_what_to_write_instead",
        "test_a_script_that_fails_by_itself_is_told_so_before_any_kill",
    ),
    "tests/process/test_adapter_accelerate.py": ("test_rank_0_and_others_die_in_steps_and_in_an_evaluation[standby]",),
    "tests/process/test_adapter_lightning.py": (
        "test_it_learns_what_the_stock_trainer_does",
        "test_every_stage_and_every_rank_killed_one_after_another",
        "test_a_standby_takes_the_place_of_who_dies_in_a_validation",
    ),
    "tests/process/test_adapter_trainer.py": (
        "test_it_learns_what_the_stock_trainer_does",
        "test_every_stage_and_every_rank_killed_one_after_another",
        "test_a_standby_takes_the_place_of_who_dies_in_an_evaluation",
        "test_the_example_ends_the_same_with_a_kill_and_without",
    ),
    "tests/process/test_adapter_trl.py": (
        "test_both_ranks_killed_before_and_after_an_evaluation[sft-lora]",
        "test_both_ranks_killed_before_and_after_an_evaluation[dpo]",
        "test_both_ranks_killed_before_and_after_an_evaluation[dpo-lora]",
        "test_standbys_take_the_places_of_rank_0_and_of_the_other",
    ),
    "tests/process/test_recipes.py": (
        "test_a_lora_training_of_a_line_loses_rank_0_and_ends_with_the_same_adapter",
        "test_fifty_steps_of_lora_teach_a_base_that_knows_prose_to_answer_in_lists",
    ),
    "tests/process/test_recipes_trl.py": ALL,
    "tests/process/test_kills.py": (
        "test_every_stage_and_every_rank_killed_one_after_another[0]",
        "test_two_ranks_killed_at_once_at_every_stage",
        "test_killed_again_during_a_recovery[form]",
        "test_a_standby_with_imports_alone_takes_over",
    ),
    "tests/process/test_standin.py": (
        "test_any_rank_of_ddp_killed_at_every_stage_on_a_device_that_runs_late[1]",
        "test_a_device_that_fails_for_good_is_no_error_of_the_script_and_its_rank_goes_on_elsewhere",
        "test_a_script_that_breaks_its_only_device_at_each_attempt_is_named_at_the_third",
    ),
    "tests/process/test_standin_groups.py": (
        "test_any_rank_of_ddp_killed_at_every_stage[1]",
        "test_any_rank_killed_at_every_stage_in_each_parallelism",
        "test_killed_during_a_recovery_and_between_the_vote_and_the_update",
        "test_the_rank_of_a_device_that_fails_for_good_goes_on_elsewhere_and_the_others_groups_are_aborted",
        "test_groups_that_hang_or_have_an_error_are_formed_anew_and_nobody_is_ended[hang-0]",
        "test_groups_that_hang_or_have_an_error_are_formed_anew_and_nobody_is_ended[error-1]",
        "test_a_connection_that_is_never_made_ends_with_the_abort",
        "test_one_that_skips_a_collective_is_replaced_only_if_it_does_so_again",
        "test_a_collective_in_a_graph_is_refused_before_the_first_step",
    ),
    "tests/process/test_standin_ahead.py": (
        "test_the_host_comes_into_the_next_body_while_the_device_stands_still[2]",
        "test_who_is_killed_while_its_device_stands_still_before_the_end_of_an_update_costs_no_step_and_no_number"
        "[commit after data]",
    ),
    "tests/process/test_parallel_kills.py": (
        "test_any_rank_killed_at_every_stage[tp_dp]",
        "test_any_rank_killed_at_every_stage[pp_dp]",
        "test_killed_twice_in_a_row_and_during_a_recovery",
        "test_survivors_roll_forward_a_step_that_another_has_committed[tp_dp]",
        "test_survivors_roll_forward_a_step_that_another_has_committed[pp_dp]",
        "test_each_rank_has_a_standby_of_its_own",
        "test_clipping_recomputation_and_compiled_blocks",
        "test_shards_without_a_replica_come_from_copies[fsdp2-4]",
        "test_shards_without_a_replica_come_from_copies[tp_dp-1]",
        "test_shards_without_a_replica_come_from_copies[tp_dp-4]",
        "test_killed_again_while_going_back",
        "test_shards_without_a_replica_come_from_copies[fsdp2-1]",
        "test_survivors_roll_forward_a_step_that_another_has_committed[hsdp]",
    ),
    "tests/process/test_corruption.py": (
        "test_replicas_of_shards_are_compared[hsdp]",
        "test_a_flip_in_an_optimizers_memory_is_found_too",
        "test_a_flip_and_a_kill_together[before]",
        "test_a_flip_and_a_kill_together[as they go back]",
        "test_a_flip_and_a_kill_together[itself]",
        "test_a_flip_and_a_kill_together[in the same step]",
        "test_a_comparison_at_every_step_raises_no_false_alarm",
        "test_kills_alone_raise_no_alarm",
        "test_replicas_of_shards_are_compared[tp_dp]",
        "test_replicas_of_shards_are_compared[pp_dp]",
        "test_a_flip_and_a_kill_together[as they compare]",
    ),
    "tests/process/test_elastic.py": (
        "test_a_kill_in_the_middle_of_a_change_costs_nothing[shrink: a survivor that forms]",
        "test_scripts_hear_of_each_change_on_every_rank_at_the_same_boundary",
        "test_sizes_that_cannot_be_are_refused_and_the_job_goes_on[0-at least one replica]",
        "test_replicas_of_two_shards_come_and_go_whole",
        "test_the_default_mode_stays_within_float_tolerance_of_the_fixed_run",
        "test_a_kill_in_the_middle_of_a_change_costs_nothing[grow: a candidate that builds]",
        "test_a_kill_in_the_middle_of_a_change_costs_nothing[grow: a survivor while candidates build]",
        "test_a_kill_in_the_middle_of_a_change_costs_nothing[grow: a survivor that forms]",
        "test_a_kill_in_the_middle_of_a_change_costs_nothing[grow: a newcomer that forms]",
        "test_a_kill_in_the_middle_of_a_change_costs_nothing[grow: a holder during hydration]",
        "test_a_kill_in_the_middle_of_a_change_costs_nothing[grow: the only survivor but one, and a newcomer]",
        "test_a_kill_in_the_middle_of_a_change_costs_nothing[shrink: a survivor before its first step]",
        "test_a_kill_in_the_middle_of_a_change_costs_nothing[shrink: one that was to leave]",
        "test_who_must_leave_in_the_middle_of_a_step_hears_of_it_once_and_ends_quietly",
        "test_sizes_that_cannot_be_are_refused_and_the_job_goes_on[5-more than the maximum of 4]",
        "test_more_replicas_than_micro_batches_are_refused",
        "test_the_small_gpt_is_the_same_in_a_world_that_changes_and_in_fixed_ones",
        "test_a_job_that_cannot_fill_a_rank_goes_on_with_fewer_replicas",
    ),
    "tests/process/test_elastic_data.py": (
        "test_shares_of_a_global_batch_follow_the_world[not cached]",
        "test_shares_of_a_global_batch_follow_the_world[in place]",
    ),
    "tests/process/test_elastic_example.py": ALL,
    "tests/process/test_elastic_trainer.py": ALL,
    "tests/process/test_port.py": ALL,
    "tests/process/test_examples.py": (
        "test_an_example_loses_ranks_and_ends_the_same[01-alone]",
        "test_an_example_loses_ranks_and_ends_the_same[03-fsdp2]",
        "test_an_example_loses_ranks_and_ends_the_same[04-hsdp]",
        "test_an_example_loses_ranks_and_ends_the_same[06-data]",
        "test_an_example_loses_ranks_and_ends_the_same[07-elastic]",
        "test_an_example_loses_ranks_and_ends_the_same[10-folds]",
        "test_an_example_on_hugging_face_loses_a_rank_and_ends_the_same",
    ),
    "tests/process/test_elastic_launch.py": (
        "test_a_node_without_the_script_is_told_so",
        "test_an_agent_of_an_elastic_job_that_is_told_to_end_gives_its_node_back",
        "test_sizes_that_cannot_be_are_refused_and_the_job_goes_on",
        "test_a_node_that_joined_and_is_killed_is_not_waited_for",
        "test_a_job_is_made_larger_and_smaller_by_a_command",
        "test_a_drained_node_of_this_machine_leaves_and_its_launcher_starts_no_other",
        "test_an_agent_that_ends_after_its_notice_before_its_ranks_have_left_is_not_started_again",
        "test_the_first_node_can_be_drained_and_its_launcher_goes_on_as_the_coordinators_host",
        "test_signals_give_a_node_back_and_a_second_one_ends_it_at_once",
        "test_a_node_that_is_given_back_infers_until_the_training_takes_it_again",
    ),
    "tests/process/test_elastic_policy.py": (
        "test_a_group_of_the_scripts_own_follows_the_world_also_through_a_single_replica",
        "test_a_group_that_cannot_follow_fixes_the_world",
    ),
    "tests/process/test_elastic_soak.py": ALL,
    "tests/process/test_elastic_together.py": (
        "test_standbys_become_ranks_of_a_larger_world_and_still_replace_lost_ones[built]",
        "test_standbys_become_ranks_of_a_larger_world_and_still_replace_lost_ones[imports]",
        "test_checkpoints_copies_and_comparisons_go_on_through_changes",
    ),
    "tests/process/test_elastic_waiting.py": (
        "test_below_the_minimum_for_too_long_the_state_is_saved_and_the_job_can_be_run_again",
        "test_a_lost_node_is_done_without_and_the_next_one_is_grown_onto",
        "test_below_the_minimum_the_state_waits_in_memory_until_another_node_comes",
    ),
    "tests/process/test_leaks.py": ALL,
    "tests/process/test_microbatches.py": (
        "test_any_world_trains_on_the_same_batches[ddp-1-8]",
        "test_any_world_trains_on_the_same_batches[ddp-2-8]",
        "test_any_world_trains_on_the_same_batches[ddp-4-8]",
        "test_any_world_trains_on_the_same_batches[hsdp-6-4]",
        "test_any_world_trains_on_the_same_batches[fsdp2-2-4]",
        "test_the_gradient_is_that_of_the_mean_over_all_samples[plain-1]",
        "test_the_gradient_is_that_of_the_mean_over_all_samples[ddp-2]",
        "test_a_body_that_does_not_go_through_all_of_them_is_told[leaves-was left without micro.backward]",
        "test_a_body_that_does_not_go_through_all_of_them_is_told[plain-backward-was left without micro.backward]",
    ),
    "tests/process/test_invariant.py": (
        "test_hsdp_over_its_replicate_dimension",
        "test_another_launcher_without_recovery_gives_the_same",
        "test_every_loss_and_the_final_state_are_the_same_in_any_world[1]",
        "test_every_loss_and_the_final_state_are_the_same_in_any_world[2]",
        "test_every_loss_and_the_final_state_are_the_same_in_any_world[4]",
        "test_the_default_mode_is_equal_only_nearly",
        "test_kills_in_a_sharded_world_change_no_bit",
        "test_every_loss_and_the_final_state_are_the_same_in_any_world[3]",
    ),
    "tests/process/test_nodes.py": (
        "test_an_agent_that_goes_on_after_its_lease_finds_itself_shut_out",
        "test_a_killed_agent_costs_no_step[0-node0-lost0]",
        "test_a_killed_agent_costs_no_step[1-node0-lost0]",
        "test_a_killed_agent_costs_no_step[1-node1-lost1]",
        "test_one_node_after_the_other",
        "test_a_node_lost_while_another_is_mended",
        "test_a_node_that_does_not_come_back_ends_the_job_at_its_deadline",
        "test_a_node_whose_agents_do_not_stay_ends_the_job",
        "test_nodes_of_one_machine_train_as_one_node_would",
    ),
    "tests/process/test_network.py": (
        "test_hosts_train_as_one_machine_would",
        "test_a_spare_takes_the_ranks_of_a_host_that_dies",
        "test_a_host_that_is_cut_off_commits_nothing_and_is_the_spare_when_its_link_is_back[what it sends]",
        "test_a_host_that_is_cut_off_commits_nothing_and_is_the_spare_when_its_link_is_back[what it is sent]",
    ),
    "tests/process/test_spares.py": (
        "test_a_spare_takes_the_ranks_of_a_lost_node_without_waiting_for_it[node0-ranks0]",
        "test_a_spare_that_dies_as_it_is_needed_is_done_without",
        "test_a_lost_node_that_is_back_is_the_spare_of_the_next",
    ),
    "tests/process/test_shard_nodes.py": (
        "test_a_lost_shard_with_a_durable_checkpoint_starts_again_from_it",
        "test_a_lost_node_costs_a_few_steps_and_no_disk[nodes1]",
        "test_a_lost_node_costs_a_few_steps_and_no_disk[nodes2]",
    ),
    "tests/process/test_data_kills.py": (
        "test_workers_killed_at_every_stage_read_no_sample_again[batches-0]",
        "test_workers_killed_at_every_stage_read_no_sample_again[micro-batches-0]",
        "test_the_producer_killed_while_it_is_idle_costs_nothing[micro-batches]",
        "test_the_producer_killed_twice_while_it_makes_a_batch[batches-1]",
        "test_the_producer_killed_twice_while_it_makes_a_batch[micro-batches-1]",
        "test_producer_and_workers_killed",
        "test_a_producer_that_is_stopped_is_not_waited_for_for_long",
    ),
    "tests/process/test_data_producer.py": (
        "test_every_sample_is_read_once_and_training_is_the_same_as_without_a_cache[0-cached]",
        "test_every_sample_is_read_once_and_training_is_the_same_as_without_a_cache[2-cached]",
        "test_so_it_is_with_micro_batches[2]",
        "test_damaged_entries_are_made_anew[truncate]",
        "test_an_error_of_the_data_set_ends_the_job_with_its_own_traceback[1]",
        "test_a_job_of_one_rank_ends_as_plain_python_does",
    ),
    "tests/process/test_data_nodes.py": (
        "test_a_replaced_node_fills_its_cache_again_by_itself[node0]",
        "test_a_replaced_node_fills_its_cache_again_by_itself[node1]",
    ),
    "tests/process/test_data_in_place.py": (
        "test_kills_at_every_stage_change_nothing_and_nobody_makes_batches_ahead[standby]",
    ),
    "tests/process/test_data_verify.py": (
        "test_every_sample_was_read_once_by_ranks_that_died_at_every_stage[torch's]",
        "test_every_sample_was_read_once_by_ranks_that_died_at_every_stage[nothing logged]",
        "test_a_loader_of_its_own_order_is_held_to_shares_and_digests",
        "test_the_lines_of_an_agent_that_was_killed_are_missed_and_not_called_wrong",
        "test_worlds_of_4_3_4_and_2_with_kills_have_read_what_the_undisturbed_run_has",
        "test_steps_that_ran_again_have_read_the_same",
    ),
    "tests/process/test_data_cleanup.py": (
        "test_nothing_of_the_cache_outlives_the_job[Ctrl-C-1]",
        "test_nothing_of_the_cache_outlives_the_job[Ctrl-C twice-2]",
        "test_nothing_of_the_cache_outlives_the_job[SIGTERM-1]",
        "test_nothing_of_the_cache_outlives_the_job[launcher killed-2]",
        "test_jobs_with_the_same_root_leave_each_other_alone[agent]",
        "test_workers_are_told_the_budget[flags1-0]",
        "test_a_root_without_room_costs_the_cache_and_not_the_job[read-only]",
        "test_a_root_without_room_costs_the_cache_and_not_the_job[no inodes]",
    ),
    "tests/process/test_data_pack.py": (
        "test_killed_at_any_moment_it_goes_on[packer-the inputs are read]",
        "test_killed_at_any_moment_it_goes_on[packer-one worker is through]",
        "test_killed_at_any_moment_it_goes_on[packer and workers-it tokenizes]",
        "test_what_a_worker_has_tokenized_is_not_tokenized_again",
        "test_interrupted_it_leaves_nobody_and_goes_on[15]",
        "test_a_worker_that_dies_is_told",
        "test_where_files_cannot_grow_it_says_so",
        "test_on_a_terminal_there_is_a_bar",
        "test_killed_at_any_moment_it_goes_on[packer-it tokenizes]",
        "test_a_second_packer_is_kept_out",
    ),
    "tests/process/test_durable_run.py": (
        "test_all_ranks_go_on_from_an_older_one_where_one_of_them_cannot_read_its_part_of_the_newest",
        "test_the_last_state_is_on_disk_before_the_job_ends_and_the_newest_k_stay",
        "test_a_fault_that_leaves_a_replica_reads_nothing_from_disk",
        "test_a_sharded_world_resumes_from_its_parts[pp_dp]",
        "test_a_sharded_world_resumes_from_its_parts[fsdp2]",
        "test_the_death_of_the_rank_that_takes_snapshots_does_not_keep_the_last_state_from_the_disk",
        "test_what_cannot_be_written_is_said_once_and_training_goes_on",
    ),
    "tests/process/test_restartable.py": (
        "test_an_evaluation_between_steps_goes_through_the_death_of_any_rank[0]",
        "test_evaluations_and_steps_take_turns_at_dying",
        "test_a_training_whose_optimizer_nobody_protects_is_refused_and_not_run_twice",
        "test_a_training_that_draws_before_its_loop_draws_the_same_after_a_fault",
        "test_an_unwrapped_collective_that_fails_where_none_was_seen_before_is_named",
    ),
    "tests/process/test_rootless_runs.py": (
        "test_an_unmodified_script_runs_with_no_store_server_in_any_process[plain_fsdp2.py]",
        "test_worlds_made_anew_and_restarts_find_no_keys_of_earlier_ones",
    ),
    "tests/process/test_run_interrupted.py": (
        "test_a_signal_ends_the_job_and_asks_to_be_run_again[1-the terminal was closed]",
        "test_ctrl_c_on_any_node_ends_the_job_on_all",
    ),
    "tests/process/test_state_copies.py": ("test_fifty_rounds_of_dying_leave_no_descriptor_thread_or_memory",),
    "tests/process/test_comm_elastic.py": (
        "test_tensor_parallel_replicas_go_on_as_in_a_fixed_world",
        "test_every_loss_norm_and_bit_of_state_is_that_of_a_fixed_world_in_invariant_mode",
    ),
    "tests/process/test_data_room.py": ("test_a_place_that_another_fills_in_mid_training[0]",),
    "tests/process/test_comm_halts.py": (
        "test_every_wait_ends_within_a_second_and_nothing_is_left_after_thirty_halts",
    ),
    "tests/process/test_between.py": (
        "test_state_that_changes_where_nobody_looked_comes_out_as_without_faults[between-faults0]",
        "test_state_that_changes_where_nobody_looked_comes_out_as_without_faults[between,guarded,restartable-faults2]",
    ),
    "tests/unit/hydration/test_durable_sharded.py": (
        "test_plain_distributed_checkpoint_loads_dtensors_of_another_mesh[placement1]",
        "test_plain_distributed_checkpoint_loads_dtensors_of_another_mesh[placement0]",
    ),
    "tests/process/test_sources_processes.py": (
        "test_loader_workers_read_what_the_script_has_opened[spawn-_json_lines]",
        "test_loader_workers_read_what_the_script_has_opened[spawn-_parquet]",
        "test_loader_workers_read_what_the_script_has_opened[spawn-_arrow]",
    ),
    "tests/process/test_user_errors.py": (
        "test_python_state_that_no_newcomer_could_be_sent_is_said_before_the_first_step",
    ),
    "tests/process/test_pauses_matrix.py": ("test_pauses_at_rest_and_in_a_fault_cost_nothing_but_the_pause",),
    "tests/process/test_pauses.py": ("test_who_is_only_slow_is_waited_for_across_nodes",),
    "tests/process/test_ddp_habits.py": (
        "test_ddp_below_compile_inside_a_module_and_made_after_protect_recovers",
        "test_it_runs_alone_under_plain_python_too",
    ),
    "tests/process/test_node_data.py": ("test_a_producer_that_served_is_replaced_each_time_it_dies[5]",),
    "tests/process/test_agent_life.py": (
        "test_an_agent_that_many_can_join_ends_with_its_parent_without_a_notice",
        "test_workers_outlive_their_zygote_and_the_next_one_forks_more",
    ),
}


def is_full(test: str) -> bool:
    """True if a test, by its id in pytest, belongs to the full matrix alone."""
    file, _, name = test.partition("::")
    return any(_names(entry, name) for entry in FULL.get(file, ()))


def full_files(root: Path) -> list[str]:
    """The files with tests of the full matrix alone, by this table or by marks of their own."""
    files = (*(root / "tests").rglob("test_*.py"), *root.glob("packages/*/tests/test_*.py"))
    marked = (path for path in files if _MARK in path.read_text(encoding="utf-8"))
    return sorted({*FULL, *(str(path.relative_to(root)) for path in marked)})


def stale(tests: Iterable[str]) -> list[str]:
    """Entries of the table that name none of these tests, of the files that these tests are in."""
    names: dict[str, list[str]] = {}
    for test in tests:
        file, _, name = test.partition("::")
        names.setdefault(file, []).append(name)
    return [
        f"{file}::{entry}"
        for file, entries in FULL.items()
        for entry in entries
        if file in names and not any(_names(entry, name) for name in names[file])
    ]


def _names(entry: str, name: str) -> bool:
    return not entry or name == entry or name.startswith(f"{entry}[")


if __name__ == "__main__":
    sys.stdout.write(" ".join(full_files(Path.cwd())))
