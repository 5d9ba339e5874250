"""Host backup of the engine's weights, reduced to the weights that no sync rewrites.

SGLang's own backup copies all weights to pinned memory when they are released, and back when they
are resumed (61 GB: 17 s and 5 s). A sync overwrites nearly all of them right after.

    backup = create_backup(model, policy, allocations)  # once, after the model is loaded
    backup.save(model)                        # before the memory is released
    backup.restore()                          # after the memory is mapped again
    backup.leave_out(plan)                      # from here on without the bytes that syncs rewrite
    backup.withdraw(reason)                   # the plan does not hold: save everything again
    backup.sync_completed()                   # every byte of the coverage was written

Nothing here imports sglang. `hooks.memory` connects the backup to the scheduler.
"""
