"""Thin shims over Linux calls that Python has no module for. No policy here.

Face::

    fallocate   punch_hole, reserve
    fanotify    answer, create_group, mark_directory, parse_events
    loop        attach_loop
    mount       mount_bind, mount_erofs, mount_overlay, MountTarget, umount
    mountinfo   file_system_of, is_mount_point, MountPoint, read_mounts, TABLE
    process     boot_id, in_background, is_alive, mount_namespace, set_descriptor_limit, set_oom_score, start_time,
                sync_file_system
    unixsocket  connect_unix, listen_unix, remove_socket, socket_identity
"""
