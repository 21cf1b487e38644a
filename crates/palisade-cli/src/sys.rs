//! The few calls that only the C library offers: signal masks and dispositions.
//!
//! The one file of the command with `unsafe`. Each call passes pointers to values that live on
//! this stack frame and were zeroed or initialised by the C library itself; no handler of our own
//! is installed here.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr;

use rustix::process::Signal;

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

/// Runs `action` with SIGTTOU blocked on this thread: a process in the background that takes the
/// terminal back would be stopped by it.
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

/// Runs `action` with SIGTSTP doing what it does by default, then puts its handler back. The
/// kernel knows when stopping by default must not happen: nobody would be there to resume us.
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
