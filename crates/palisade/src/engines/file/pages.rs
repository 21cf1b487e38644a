//! Checks the pages of LMDB's file before LMDB reads them.
//!
//! LMDB trusts its pages: a damaged one makes it read outside of them, which ends the process.
//! So whoever opens a store walks both trees first, from the current root to the last node, and
//! refuses what LMDB could stumble over. What the records say is checked where they are read.
//! The layout is that of LMDB's data version 1 on 64-bit little-endian machines; elsewhere
//! nothing is checked.

/// A damaged file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Damaged;

type Checked = Result<(), Damaged>;

const HEADER: usize = 16;
const NODE: usize = 8;
const BRANCH: u64 = 1;
const LEAF: u64 = 2;
const OVERFLOW: u64 = 4;
/// The flag of a node whose value is on pages of its own.
const BIG: u64 = 1;
/// The root of an empty tree.
const NONE: u64 = u64::MAX;
/// Deeper than any tree can be; LMDB's cursors take no more.
const DEEPEST: u64 = 32;

/// Checks a whole file with pages of `size` bytes.
pub(super) fn check(file: &[u8], size: usize) -> Checked {
    if cfg!(not(all(
        target_pointer_width = "64",
        target_endian = "little"
    ))) {
        return Ok(());
    }
    let metas = [file.get(..size), file.get(size..2 * size)];
    let [Some(first), Some(second)] = metas else {
        return Err(Damaged);
    };
    // The current one is that of the later transaction.
    let meta = match number(first, 144, 8)? >= number(second, 144, 8)? {
        true => first,
        false => second,
    };
    let last = number(meta, 136, 8)?;
    let pages = usize::try_from(last).map_err(|_| Damaged)?;
    if pages
        .checked_add(1)
        .is_none_or(|pages| pages > file.len() / size)
    {
        return Err(Damaged);
    }
    let mut walk = Walk {
        file,
        size,
        used: vec![false; pages + 1],
    };
    walk.tree(meta, 40, Tree::Free)?;
    walk.tree(meta, 88, Tree::Main)
}

fn number(bytes: &[u8], at: usize, length: usize) -> Result<u64, Damaged> {
    let bytes = at.checked_add(length).and_then(|end| bytes.get(at..end));
    let mut word = [0; 8];
    word[..length].copy_from_slice(bytes.ok_or(Damaged)?);
    Ok(u64::from_le_bytes(word))
}

fn sound(condition: bool) -> Checked {
    condition.then_some(()).ok_or(Damaged)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Tree {
    /// Lists of pages that are free, by transaction.
    Free,
    /// The records.
    Main,
}

struct Walk<'a> {
    file: &'a [u8],
    size: usize,
    /// The pages that were met: none is met twice.
    used: Vec<bool>,
}

impl<'a> Walk<'a> {
    /// Walks the tree that is described at `at` in the meta page.
    fn tree(&mut self, meta: &[u8], at: usize, tree: Tree) -> Checked {
        // Integer keys for the free pages, nothing special for the records.
        let flags = if tree == Tree::Free { 8 } else { 0 };
        sound(number(meta, at + 4, 2)? & 0x7fff == flags)?;
        let depth = number(meta, at + 6, 2)?;
        let root = number(meta, at + 40, 8)?;
        if root == NONE {
            return Ok(());
        }
        sound(depth > 0 && depth <= DEEPEST)?;
        self.page(root, depth, tree)
    }

    fn take(&mut self, page: u64) -> Checked {
        let at = usize::try_from(page).map_err(|_| Damaged)?;
        sound(at >= 2)?;
        let used = self.used.get_mut(at).ok_or(Damaged)?;
        sound(!std::mem::replace(used, true))
    }

    fn bytes(&self, page: u64) -> &'a [u8] {
        // Taken before, so that it lies in the file.
        let at = page as usize * self.size;
        &self.file[at..at + self.size]
    }

    fn page(&mut self, page: u64, depth: u64, tree: Tree) -> Checked {
        self.take(page)?;
        let bytes = self.bytes(page);
        let kind = if depth == 1 { LEAF } else { BRANCH };
        sound(number(bytes, 0, 8)? == page && number(bytes, 10, 2)? == kind)?;
        let lower = number(bytes, 12, 2)? as usize;
        let upper = number(bytes, 14, 2)? as usize;
        sound(lower >= HEADER && lower.is_multiple_of(2) && lower <= upper && upper <= self.size)?;
        let keys = (lower - HEADER) / 2;
        sound(keys >= if depth == 1 { 1 } else { 2 })?;
        let mut before: Option<&[u8]> = None;
        // LMDB moves nodes about as one block: they fill the page's end without a gap.
        let mut extents = Vec::with_capacity(keys);
        for key in 0..keys {
            let at = number(bytes, HEADER + 2 * key, 2)? as usize;
            sound(at >= upper && at.is_multiple_of(2))?;
            let node = bytes.get(at..).ok_or(Damaged)?;
            let key_end = NODE + number(node, 6, 2)? as usize;
            let name = node.get(NODE..key_end).ok_or(Damaged)?;
            let low = number(node, 0, 4)?;
            let flags = number(node, 4, 2)?;
            if depth > 1 {
                // The first key of a branch page is left out.
                sound(key == 0 || in_order(before, name, tree))?;
                before = (key > 0).then_some(name);
                extents.push((at, key_end));
                self.page(low | flags << 32, depth - 1, tree)?;
                continue;
            }
            sound(in_order(before, name, tree))?;
            before = Some(name);
            let in_node = if flags == BIG { 8 } else { low as usize };
            extents.push((at, key_end + in_node));
            let value = match flags {
                0 => node.get(key_end..key_end + in_node).ok_or(Damaged)?,
                BIG => self.big(number(node, key_end, 8)?, low as usize)?,
                _ => return Err(Damaged),
            };
            if tree == Tree::Free {
                self.free_list(value)?;
            }
        }
        extents.sort_unstable();
        let mut end = upper;
        for (at, length) in extents {
            sound(at == end)?;
            end = at + length.next_multiple_of(2);
        }
        sound(end == self.size)
    }

    /// A value on pages of its own.
    fn big(&mut self, page: u64, length: usize) -> Result<&'a [u8], Damaged> {
        self.take(page)?;
        let first = self.bytes(page);
        sound(number(first, 0, 8)? == page && number(first, 10, 2)? == OVERFLOW)?;
        let pages = number(first, 12, 4)?;
        sound(pages as usize == (HEADER + length).div_ceil(self.size))?;
        for more in 1..pages {
            self.take(page + more)?;
        }
        let at = page as usize * self.size + HEADER;
        self.file.get(at..at + length).ok_or(Damaged)
    }

    /// The number of free pages, then each of them.
    fn free_list(&mut self, list: &[u8]) -> Checked {
        let count = number(list, 0, 8)?;
        sound(list.len() as u64 / 8 == count.saturating_add(1))?;
        for page in 1..=count as usize {
            self.take(number(list, 8 * page, 8)?)?;
        }
        Ok(())
    }
}

fn in_order(before: Option<&[u8]>, name: &[u8], tree: Tree) -> bool {
    match (tree, before) {
        (Tree::Main, None) => !name.is_empty(),
        (Tree::Main, Some(before)) => before < name,
        (Tree::Free, None) => name.len() == 8,
        (Tree::Free, Some(before)) => match (number(before, 0, 8), number(name, 0, 8)) {
            (Ok(before), Ok(after)) => name.len() == 8 && before < after,
            _ => false,
        },
    }
}
