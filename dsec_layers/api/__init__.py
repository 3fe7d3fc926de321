"""The verbs, with typed results: what the command line and library users call.

One module a verb or a family of them: open what the session gives, call engines, return a value. Prints nothing, reads no settings, keeps no engine of its own.

Face::

    background   attach_detached
    build        build, Built, clear_steps, import_source
    diskconvert  convert, merge, resize, seal, verify
    disks        attach, Attached, branch, commit, create, detach, DiskInfo, info, Sealed, snapshot
    doctor       Check, doctor
    dump         Dump, dump, KINDS
    environment  Created, env_create, gc, pull, push, rm, Verified, verify
    export       export, Exported
    look         diff, Difference, inspect, Inspection, Listed, ls
    mounts       cache_clear, cache_show, mount, ps, Ran, run, stop, umount
    nbd          run, serve_ref, Serving
    session      Session
"""
