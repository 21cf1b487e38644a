//! The few calls that only the C library offers: signal masks and dispositions, and the fork.
//!
//! The one file of the command with `unsafe`. Each call on signals passes pointers to values that
//! live on this stack frame and were zeroed or initialised by the C library itself; no handler of
//! our own is installed here.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};
use rustix::termios::tcsetpgrp;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Whether `signal` was set to be ignored, as `nohup` and `&` in a script do.
pub(crate) fn is_ignored(signal: Signal) -> bool {
    let mut now = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a null new action only asks; the answer goes to `now`, which has room for it, and
    // zeroes are a valid `sigaction`, so that it is initialised even if the call fails.
    let now = unsafe {
        libc::sigaction(signal.as_raw(), ptr::null(), now.as_mut_ptr());
        now.assume_init()
    };
    now.sa_sigaction == libc::SIG_IGN
}

/// Whether SIGXFSZ is ignored by our own choice.
static XFSZ_IS_OURS: AtomicBool = AtomicBool::new(false);

/// Makes a write beyond the limit on the size of files (`ulimit -f`) fail instead of ending this
/// process. The command gets the original disposition of the signal.
pub(crate) fn ignore_file_size_signal() {
    if !is_ignored(Signal::XFSZ) {
        // SAFETY: to ignore a signal runs no code of ours.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        XFSZ_IS_OURS.store(true, Ordering::Relaxed);
    }
}

/// Checks that this process may open this many more files.
///
/// # Errors
/// The reason why it may not.
pub(crate) fn can_open(files: usize) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let first = rustix::fs::open("/", flags, Mode::empty())?;
    let more = (1..files).map(|_| first.try_clone());
    more.collect::<io::Result<Vec<_>>>().map(drop)
}

/// Runs `action` with SIGTTOU blocked on this thread: it would stop a background process that
/// takes the terminal back.
pub(crate) fn without_ttou<T>(action: impl FnOnce() -> T) -> T {
    let mut block = MaybeUninit::<libc::sigset_t>::zeroed();
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `sigemptyset` initialises the set that the next two calls use; both sets outlive
    // the calls, and the mask belongs to this thread alone.
    let blocked = unsafe {
        libc::sigemptyset(block.as_mut_ptr());
        libc::sigaddset(block.as_mut_ptr(), libc::SIGTTOU);
        libc::pthread_sigmask(libc::SIG_BLOCK, block.as_ptr(), before.as_mut_ptr()) == 0
    };
    let done = action();
    if blocked {
        // SAFETY: `before` was filled by the call above, which succeeded.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    }
    done
}

/// Runs `action` with the default action of SIGTSTP, then restores its handler. By default the
/// kernel does not stop a process in an orphaned group, which nobody could resume.
pub(crate) fn with_default_tstp<T>(action: impl FnOnce() -> T) -> T {
    let mut default = MaybeUninit::<libc::sigaction>::zeroed();
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: zeroes are a valid `sigaction` with the action SIG_DFL, no flags and an empty mask;
    // both structs outlive the call.
    let changed = unsafe {
        libc::sigemptyset(&raw mut (*default.as_mut_ptr()).sa_mask);
        libc::sigaction(libc::SIGTSTP, default.as_ptr(), before.as_mut_ptr()) == 0
    };
    let done = action();
    if changed {
        // SAFETY: `before` was filled by the call above, which succeeded, and holds the handler
        // that was in force.
        unsafe { libc::sigaction(libc::SIGTSTP, before.as_ptr(), ptr::null_mut()) };
    }
    done
}

/// Signals that are blocked, and taken on request, on this thread and those that it starts, until
/// this is dropped.
pub(crate) struct Withheld {
    which: libc::sigset_t,
    before: Mask,
}

/// The signals that a thread blocks.
#[derive(Clone, Copy)]
pub(crate) struct Mask(libc::sigset_t);

impl Mask {
    /// Puts it in force for this thread.
    pub(crate) fn set(&self) {
        // SAFETY: the set was filled by the C library, and the mask belongs to this thread alone.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

impl Withheld {
    /// Blocks these signals. Don't pass ignored ones: a blocked signal is queued even if ignored.
    pub(crate) fn these(signals: impl IntoIterator<Item = Signal>) -> Self {
        let mut which = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: `sigemptyset` initialises the set that `sigaddset` changes, and both outlive it.
        let which = unsafe {
            libc::sigemptyset(which.as_mut_ptr());
            for signal in signals {
                libc::sigaddset(which.as_mut_ptr(), signal.as_raw());
            }
            which.assume_init()
        };
        Self::block(which)
    }

    /// Blocks all signals that can be blocked.
    fn all() -> Self {
        let mut which = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: `sigfillset` initialises the set, which outlives the call.
        let which = unsafe {
            libc::sigfillset(which.as_mut_ptr());
            which.assume_init()
        };
        Self::block(which)
    }

    fn block(which: libc::sigset_t) -> Self {
        let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: both sets outlive the call; zeroes are a valid set, should it fail. The mask
        // belongs to this thread alone.
        let before = unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const which, before.as_mut_ptr());
            Mask(before.assume_init())
        };
        Self { which, before }
    }

    /// What was blocked before.
    pub(crate) fn before(&self) -> Mask {
        self.before
    }

    /// Waits for one of them.
    pub(crate) fn next(&self, longest: Duration) -> Option<Signal> {
        let longest = libc::timespec {
            tv_sec: libc::time_t::try_from(longest.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: longest.subsec_nanos().into(),
        };
        // SAFETY: the set and the time outlive the call; nobody asks for more about the signal.
        let signal = unsafe {
            libc::sigtimedwait(&raw const self.which, ptr::null_mut(), &raw const longest)
        };
        Signal::from_named_raw(signal)
    }
}

impl Drop for Withheld {
    fn drop(&mut self) {
        self.before.set();
    }
}

/// Makes the kernel keep the status of ended children, even if SIGCHLD was ignored at our start.
pub(crate) fn default_child_signal() {
    // SAFETY: the default action runs no code of ours.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

/// A file that is readable while `signal`, which must be blocked, is pending.
pub(crate) fn signal_fd(signal: Signal) -> io::Result<OwnedFd> {
    let mut which = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `sigemptyset` initialises the set, which outlives the calls; the descriptor is new
    // and nobody else's.
    unsafe {
        libc::sigemptyset(which.as_mut_ptr());
        libc::sigaddset(which.as_mut_ptr(), signal.as_raw());
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        match libc::signalfd(-1, which.as_ptr(), flags) {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}

/// Registers `file` with the runtime for readability.
pub(crate) fn watch(file: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is its owner's until that is dropped, and always the same.
    unsafe { AsyncFd::register_with_interest(file, Interest::READABLE) }.map_err(io::Error::from)
}

/// Forks a process that runs `work` with all signals blocked, and then ends.
///
/// # Errors
/// When there is another thread, or the system refuses.
pub(crate) fn fork(work: impl FnOnce()) -> io::Result<Pid> {
    // A directory has two links and one more for each subdirectory, so this counts the threads.
    // Without `/proc` the caller is trusted.
    if rustix::fs::stat("/proc/self/task").is_ok_and(|tasks| tasks.st_nlink != 3) {
        return Err(io::Error::other("there is another thread"));
    }
    // Blocked before the fork, so that no signal to our group hits the new process unprepared.
    let withheld = Withheld::all();
    // SAFETY: there is no other thread, so that the new process finds no lock taken and no value
    // half changed: it may run any code. It never returns from here, and so it drops nothing that
    // belongs to its parent but what `work` was given.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            std::mem::forget(withheld);
            // A panic must not unwind into the parent's code.
            let _ = catch_unwind(AssertUnwindSafe(work));
            // SAFETY: it ends the process, without what the parent had planned for its own end.
            unsafe { libc::_exit(0) }
        }
        pid => Pid::from_raw(pid).ok_or_else(|| io::Error::other("fork answered with no pid")),
    }
}

/// Makes the command start with the signals of `mask` blocked and in the foreground of `terminal`,
/// and makes the kernel kill it if this process ends before it. All signals must be blocked here,
/// and the command must lead a process group.
pub(crate) fn prepare(command: &mut Command, mask: Mask, terminal: Option<File>) {
    let parent = getpid();
    let arm = move || {
        if let Some(terminal) = &terminal {
            // Called from the background: SIGTTOU would stop us if it were not blocked. A terminal
            // that is gone is ignored.
            let _ = tcsetpgrp(terminal, getpid());
        }
        if XFSZ_IS_OURS.load(Ordering::Relaxed) {
            // SAFETY: the default action runs no code of ours, and the call takes no lock.
            unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_DFL) };
        }
        mask.set();
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // If the parent died before this call, the kernel would never kill the command.
        if getppid() == Some(parent) {
            Ok(())
        } else {
            Err(io::ErrorKind::NotFound.into())
        }
    };
    // SAFETY: some system calls that allocate nothing and take no lock, also when they fail.
    unsafe { command.pre_exec(arm) };
}

/// Closes the files that this process inherited for the command: those that an `exec` does not
/// close. The standard streams become `/dev/null`, stderr unless it is kept.
pub(crate) fn let_go_of_inherited_files(keep_stderr: bool) {
    if let Ok(null) = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        // Fails only without memory; the files then stay open.
        let _ = rustix::stdio::dup2_stdin(&null);
        let _ = rustix::stdio::dup2_stdout(&null);
        if !keep_stderr {
            let _ = rustix::stdio::dup2_stderr(&null);
        }
    }
    let open = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
    let open = open.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<RawFd>().ok());
    for fd in open.collect::<Vec<_>>().into_iter().filter(|fd| *fd > 2) {
        // SAFETY: it is borrowed for a question that fails if it is not open (the listing itself
        // is closed by now). All that this program opens is closed by an `exec`: what is not
        // closed by one belongs to no value of ours.
        unsafe {
            let flags = rustix::io::fcntl_getfd(BorrowedFd::borrow_raw(fd).as_fd());
            if flags.is_ok_and(|flags| !flags.contains(rustix::io::FdFlags::CLOEXEC)) {
                libc::close(fd);
            }
        }
    }
}
