"""Host backup of the engine's weights, reduced to those that no sync rewrites.

Why: SGLang's own backup copies all weights to pinned memory when they are released and back when
they are resumed (61 GB: 17 s and 5 s), although a sync overwrites nearly all of them right after.

    backup = create_backup(model, policy, allocations)  # once, after the model is loaded
    backup.save(model)                        # before the memory is released
    backup.restore()                          # after it is mapped again
    backup.publish(plan)                      # from now on without the bytes that syncs rewrite
    backup.withdraw("why")                    # the plan does not hold: everything again
    backup.sync_completed()                   # every byte of the coverage was written

Nothing here imports sglang; `hooks.memory` connects it to the scheduler.
"""
