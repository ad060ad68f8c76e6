"""Small scripts that write in unusual ways, for the tests of the sandbox: by name, each runs in a folder of its own.

The folder has `checkpoint.pt`, `data/a.txt` and `data/deep/b.txt`. `outside` is the folder's absolute path. A script that
ends without an error has done what it wanted, as far as it can see.
"""

from __future__ import annotations

FILES = {"checkpoint.pt": b"weights", "data/a.txt": b"a", "data/deep/b.txt": b"b"}

SCRIPTS = {
    "write": "open('checkpoint.pt', 'wb').write(b'x')",
    "append": "open('checkpoint.pt', 'ab').write(b'x')",
    "read_and_write": "f = open('checkpoint.pt', 'r+b'); f.write(b'x'); f.close()",
    "symbolic_link": "os.symlink(outside + '/checkpoint.pt', 'latest'); open('latest', 'wb').write(b'x')",
    "hard_link": "os.link('checkpoint.pt', 'hard'); open('hard', 'wb').write(b'x')",
    "linked_folder": "os.symlink(outside + '/data', 'folder'); open('folder/a.txt', 'w').write('x')",
    "link_in_tmp": """
folder = tempfile.mkdtemp(); os.symlink(outside, folder + '/link'); open(folder + '/link/checkpoint.pt', 'w').write('x')
""",
    "remove": "os.remove('checkpoint.pt'); assert not os.path.exists('checkpoint.pt')",
    "remove_tree": "shutil.rmtree('data'); assert os.listdir('.') == ['checkpoint.pt']",
    "remove_folder_and_make_it_again": "shutil.rmtree('data'); os.mkdir('data'); assert os.listdir('data') == []",
    "walk_with_descriptors": """
for folder, _, names, descriptor in os.fwalk('.', topdown=False):
    for name in names:
        os.unlink(name, dir_fd=descriptor)
""",
    "open_at": """
folder = os.open('data', os.O_RDONLY)
file = os.open('a.txt', os.O_WRONLY | os.O_TRUNC, dir_fd=folder); os.write(file, b'x')
""",
    "rename": "os.rename('checkpoint.pt', 'moved'); assert open('moved', 'rb').read() == b'weights'",
    "replace": "open('new', 'w').write('x'); os.replace('new', 'checkpoint.pt'); assert open('checkpoint.pt').read() == 'x'",
    "rename_at": "folder = os.open('.', os.O_RDONLY); os.rename('checkpoint.pt', 'b', src_dir_fd=folder, dst_dir_fd=folder)",
    "truncate": "os.truncate('checkpoint.pt', 0)",
    "truncate_by_descriptor": "f = open('checkpoint.pt', 'r+b'); os.ftruncate(f.fileno(), 1)",
    "change_mode": "os.chmod('checkpoint.pt', 0)",
    "change_mode_by_descriptor": "os.fchmod(os.open('checkpoint.pt', os.O_RDONLY), 0)",
    "change_times": "os.utime('checkpoint.pt', (1, 1))",
    "change_owner": "os.chown('checkpoint.pt', os.getuid(), os.getgid())",
    "extended_attribute": "os.setxattr('checkpoint.pt', 'user.x', b'x')",
    "raw_file": "io.FileIO('checkpoint.pt', 'w').write(b'x')",
    "memory_map": "f = open('checkpoint.pt', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0:1] = b'x'; m.flush()",
    "pipe": "os.mkfifo('pipe'); assert os.path.exists('pipe')",
    "unix_socket": "s = socket.socket(socket.AF_UNIX); s.bind('socket')",
    "database": "d = sqlite3.connect('x.db'); d.execute('create table t (a)'); d.commit()",
    "copy_in_kernel": """
source, target = os.open('data/a.txt', os.O_RDONLY), os.open('checkpoint.pt', os.O_WRONLY)
os.sendfile(target, source, 0, 1)
""",
    "by_c": """
libc = ctypes.CDLL(None); libc.fopen.restype = ctypes.c_void_p
file = libc.fopen(b'checkpoint.pt', b'w'); assert file; libc.fputs(b'x', ctypes.c_void_p(file))
libc.fclose(ctypes.c_void_p(file)); assert libc.unlink(b'data/a.txt') == 0
""",
    "through_proc_cwd": "open('/proc/self/cwd/checkpoint.pt', 'w').write('x')",
    "through_proc_root": "open('/proc/self/root' + outside + '/checkpoint.pt', 'w').write('x')",
    "through_root_of_first_process": """
try:
    open('/proc/1/root' + outside + '/checkpoint.pt', 'w').write('x')
except PermissionError:
    pass
""",
    "through_other_processes": """
for name in filter(str.isdigit, os.listdir('/proc')):
    for inside in ('root' + outside, 'cwd'):
        try:
            open(f'/proc/{name}/{inside}/checkpoint.pt', 'w').write('x')
        except OSError:
            pass
""",
    "late_thread": """
def write():
    time.sleep(0.3); open(outside + '/checkpoint.pt', 'w').write('late')
threading.Thread(target=write, daemon=True).start()
""",
    "late_timer": "threading.Timer(0.3, lambda: open(outside + '/checkpoint.pt', 'w').write('late')).start()",
    "executor": """
concurrent.futures.ThreadPoolExecutor().submit(lambda: (time.sleep(0.3), open(outside + '/checkpoint.pt', 'w').write('late')))
""",
    "finalizer": """
class Thing: pass
thing = Thing(); weakref.finalize(thing, lambda: open(outside + '/checkpoint.pt', 'w').write('late'))
""",
    "at_exit": "atexit.register(lambda: open(outside + '/checkpoint.pt', 'w').write('late'))",
    "shell": "assert os.system('echo x > checkpoint.pt; rm -r data') == 0; assert not os.path.exists('data')",
    "own_program": """
open('test', 'w').write('#!/bin/sh\\nrm checkpoint.pt\\n'); os.chmod('test', 0o755)
assert subprocess.run(['./test']).returncode == 0 and not os.path.exists('checkpoint.pt')
""",
    "by_path_variable": """
open('ls', 'w').write('#!/bin/sh\\nrm checkpoint.pt\\n'); os.chmod('ls', 0o755)
subprocess.run(['ls'], env={**os.environ, 'PATH': outside + ':' + os.environ['PATH']}, check=True)
""",
    "by_executable": "subprocess.run(['ls', 'checkpoint.pt'], executable=shutil.which('rm'), check=True)",
    "spawned_program": """
rm = shutil.which('rm'); child = os.posix_spawn(rm, ['rm', 'checkpoint.pt'], os.environ); os.waitpid(child, 0)
""",
    "forked_process": """
if os.fork() == 0:
    open('checkpoint.pt', 'w').write('x'); os._exit(0)
os.wait()
""",
    "executed_program": """
if os.fork() == 0:
    os.execv(shutil.which('rm'), ['rm', 'checkpoint.pt'])
os.wait()
""",
    "late_process": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(0.3); open(outside + '/checkpoint.pt', 'w').write('late')
    os._exit(0)
os.wait()
""",
    "spawned_python": "subprocess.run([sys.executable, '-c', 'open(\\'checkpoint.pt\\', \\'w\\')'], check=True)",
    "forkserver": """
process = multiprocessing.get_context('forkserver').Process(target=os.remove, args=(outside + '/checkpoint.pt',))
process.start(); process.join(); assert process.exitcode == 0
""",
    "pool": "multiprocessing.get_context('fork').Pool(2).map(os.remove, [outside + '/checkpoint.pt'])",
    "home": "open(os.path.expanduser('~') + '/.understudy-test', 'w').write('x')",
    "system": "open('/etc/understudy-test', 'w').write('x')",
    "written_module": "open('made.py', 'w').write('x = 3'); sys.path.insert(0, '.'); import made; assert made.x == 3",
    "listed_files": """
open('data/c.txt', 'w').write('c'); import glob, pathlib
assert sorted(glob.glob('data/*.txt')) == sorted(str(p) for p in pathlib.Path('data').glob('*.txt')) == ['data/a.txt', 'data/c.txt']
""",
    "temporary_file": """
with tempfile.NamedTemporaryFile('w', dir='.', delete=False) as file:
    file.write('x')
os.replace(file.name, 'checkpoint.pt'); assert open('checkpoint.pt').read() == 'x'
""",
    "disks": """
for name in os.listdir('/sys/block'):
    try:
        os.close(os.open('/dev/' + name, os.O_RDWR))
    except OSError:
        continue
    raise AssertionError(f'/dev/{name} can be opened')
""",
    "kernel_settings": """
for path in ('/proc/sys/kernel/hostname', '/proc/sysrq-trigger', '/sys/kernel/mm/transparent_hugepage/enabled'):
    try:
        os.close(os.open(path, os.O_WRONLY))
    except OSError:
        continue
    raise AssertionError(f'{path} can be opened')
""",
    "mounts": """
libc = ctypes.CDLL(None, use_errno=True)
assert libc.umount2(b'/tmp', 2) < 0 and libc.umount2(outside.encode(), 2) < 0
assert libc.mount(b'none', b'/', None, ctypes.c_ulong(32 | 4096), None) < 0  # remount for writing
assert libc.mount(b'tmpfs', outside.encode(), b'tmpfs', ctypes.c_ulong(0), None) < 0
""",
    "change_root": """
try:
    os.chroot('data')
except PermissionError:
    pass
else:
    raise AssertionError('chroot is possible')
""",
    "processes": """
assert sum(name.isdigit() for name in os.listdir('/proc')) < 20, 'no PID namespace'
os.kill(os.getppid(), signal.SIGKILL)  # the first process of the namespace, which can't be killed from inside
""",
    "datagrams": """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try:
    s.sendto(b'x', ('192.0.2.1', 9))
except OSError:
    pass
else:
    raise AssertionError('UDP was sent')
""",
    "connections": """
s = socket.socket(); s.settimeout(3)
try:
    s.connect(('192.0.2.1', 80))
except OSError as error:
    assert error.errno == errno.ENETUNREACH, error
else:
    raise AssertionError('connected')
""",
    "loopback": """
server = socket.create_server(('127.0.0.1', 0)); client = socket.create_connection(server.getsockname())
with socket.create_server(('::1', 0), family=socket.AF_INET6): pass
""",
    "shared_memory": """
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=100); memory.buf[0] = 1; memory.close(); memory.unlink()
lock = multiprocessing.get_context('fork').Lock(); lock.acquire(); lock.release()
""",
    "pseudo_terminal": "master, slave = os.openpty(); os.write(slave, b'x'); assert os.read(master, 1) == b'x'",
    "devices": "open('/dev/null', 'w').write('x'); assert len(open('/dev/urandom', 'rb').read(4)) == 4",
    "rename_of_a_folder": """
try:
    os.rename('data', 'moved')
except OSError as error:
    assert error.errno == errno.EXDEV, error
    shutil.move('data', 'moved')
assert open('moved/deep/b.txt').read() == 'b' and not os.path.exists('data')
""",
    "chain_of_links": """
os.symlink(outside, 'l1'); os.symlink('l1/l1/data', 'l2'); shutil.rmtree('l2/deep')
open('l2/a.txt', 'w').write('x')
os.symlink(outside + '/checkpoint.pt', 'l3'); os.link('l3', 'h3', follow_symlinks=True); os.truncate('h3', 0)
""",
    "reopened_descriptor": """
file = os.open('checkpoint.pt', os.O_RDONLY)
for path in (f'/proc/self/fd/{file}', f'/dev/fd/{file}'):
    open(path, 'w').write('x'); os.truncate(path, 0)
""",
    "raw_system_calls": """
libc = ctypes.CDLL(None, use_errno=True)
file = libc.openat(-100, (outside + '/checkpoint.pt').encode(), os.O_WRONLY | os.O_TRUNC)
libc.write(file, b'x', 1); libc.unlinkat(-100, b'data/a.txt', 0)
libc.renameat2(-100, b'checkpoint.pt', -100, b'data/deep/b.txt', 2)  # exchanges them
""",
    "new_namespace": """
libc = ctypes.CDLL(None, use_errno=True); libc.unshare(0x10000000 | 0x20000)  # user and mount
for path in (outside, '/', '/' + outside.split('/')[1]):
    libc.umount2(path.encode(), 2); libc.mount(None, path.encode(), None, ctypes.c_ulong(32 | 4096), None)
try:
    open(outside + '/checkpoint.pt', 'w').write('x')
except OSError:
    pass
""",
    "namespaces_of_the_parent": """
for kind in ('mnt', 'user', 'pid', 'net'):
    for process in ('1', str(os.getppid())):
        try:
            ctypes.CDLL(None).setns(os.open(f'/proc/{process}/ns/{kind}', os.O_RDONLY), 0)
        except OSError:
            pass
open(outside + '/checkpoint.pt', 'w').write('x')
""",
    "programs_found_first": """
os.mkdir('bin')
for name in ('git', 'ls', 'true'):
    open('bin/' + name, 'w').write(f'#!/bin/sh\\n: > {outside}/checkpoint.pt; rm -rf {outside}/data\\n')
    os.chmod('bin/' + name, 0o755)
os.environ['PATH'] = outside + '/bin:' + os.environ['PATH']
assert subprocess.run(['git']).returncode == 0 and not os.path.exists('data'); os.spawnvp(os.P_WAIT, 'ls', ['ls'])
""",
    "late_finalizers": """
class Writer:
    def __del__(self): open(outside + '/checkpoint.pt', 'w').write('late')
import builtins; builtins.kept = Writer(); atexit.register(lambda: os.system(f'sleep 0.2; rm -rf {outside}/data'))
""",
    "late_pool": """
pool = concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context('fork'))
pool.submit(os.remove, outside + '/checkpoint.pt'); pool.shutdown(wait=False)
""",
    "large_sparse_file": "f = open('large', 'wb'); f.truncate(1 << 40); assert os.path.getsize('large') == 1 << 40",
}  # fmt: skip

NEEDS_NAMESPACES = frozenset(
    "processes change_mode change_mode_by_descriptor change_times change_owner extended_attribute mounts change_root "
    "kernel_settings new_namespace namespaces_of_the_parent".split()
)
"""What Landlock does not limit, or what would reach processes outside of a PID namespace."""

PRELUDE = """
import atexit, concurrent.futures, ctypes, errno, io, mmap, multiprocessing, os, shutil, signal, socket, sqlite3, subprocess
import sys, tempfile, threading, time, weakref
outside = os.getcwd()
"""
