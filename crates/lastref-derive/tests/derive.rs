//! What `#[derive(Trace)]` makes of each kind of type: every edge is traced once.

use lastref::gc::{Gc, Object, Slot, Trace};

#[derive(Trace)]
struct Leaf;

#[derive(Trace)]
struct Named {
    first: Gc<Leaf>,
    many: Vec<Gc<Leaf>>,
    #[trace(skip)]
    skipped: Gc<Leaf>,
    number: u64,
}

#[derive(Trace)]
struct Unnamed(Gc<Leaf>, Slot<Option<Gc<Leaf>>>, #[trace(skip)] fn());

#[derive(Trace)]
enum Choice {
    Nothing,
    One(Gc<Leaf>),
    Two {
        first: Gc<Leaf>,
        second: Gc<Leaf>,
    },
    #[expect(dead_code, reason = "a variant that is skipped in part")]
    Partly(Gc<Leaf>, #[trace(skip)] fn()),
}

#[derive(Trace)]
struct Generic<T, const N: usize> {
    values: [T; N],
}

#[derive(Trace)]
enum Never {}

/// Edges that the value reports.
fn edges<T: Trace + Send + Sync + 'static>(value: T) -> usize {
    let gc = Gc::new(value);
    Object::from(&gc).referents().map_or(0, |found| found.len())
}

fn leaf() -> Gc<Leaf> {
    Gc::new(Leaf)
}

#[test]
fn each_field_that_is_not_skipped_is_traced_once() {
    let named = Named {
        first: leaf(),
        many: vec![leaf(), leaf()],
        skipped: leaf(),
        number: 7,
    };
    assert_eq!((named.number, Gc::strong_count(&named.skipped)), (7, 1));
    assert_eq!(edges(named), 3);
    let slot = Slot::new(Some(leaf()));
    let unnamed = Unnamed(leaf(), slot, || ());
    (unnamed.2)();
    assert_eq!(edges(unnamed), 2);
    assert_eq!(edges(Choice::Nothing), 0);
    assert_eq!(edges(Choice::One(leaf())), 1);
    let (first, second) = (leaf(), leaf());
    assert_eq!(edges(Choice::Two { first, second }), 2);
    assert_eq!(
        edges(Generic {
            values: [leaf(), leaf(), leaf()]
        }),
        3
    );
}

#[test]
fn types_without_edges_are_leaves_and_others_are_not() {
    assert!(Leaf::is_leaf(4));
    assert!(Never::is_leaf(4));
    assert!(Generic::<u64, 3>::is_leaf(4));
    assert!(!Named::is_leaf(4));
    assert!(!Unnamed::is_leaf(4));
    assert!(!Choice::is_leaf(4));
    assert!(!Generic::<Gc<Leaf>, 3>::is_leaf(4));
}
