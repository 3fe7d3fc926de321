"""The verbs, with typed results: what the command line and library users call.

One module a verb or a family of them: open what the session gives, call engines, return a value. Prints nothing, reads no settings, keeps no engine of its own.

Face::

    build        build, Built, clear_steps, import_source
    catalog      catalog_rebuild, Indexed
    diskconvert  convert, merge, seal
    disks        attach, attach_detached, Attached, branch, commit, create, detach, DiskInfo, info, resize, Sealed, snapshot, verify
    doctor       Check, doctor
    dump         Dump, dump, KINDS
    environment  Copied, Created, env_create, gc, pull, push, rm, rm_all, Verified, verify
    export       export, Exported
    look         diff, Difference, inspect, Inspection, Listed, ls, names
    mounts       cache_clear, cache_show, mount, ps, Ran, run, stop, umount
    nbd          run, serve_ref, Serving
    session      Session
"""
