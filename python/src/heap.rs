//! The graph of Python's objects at one moment, and ways through it: who holds an object.
//!
//! [`PyHeap`] asks Python's collector for the objects it tracks, asks each what it refers to (its
//! type's `tp_traverse`, as `gc.get_referents` does), and keeps that as numbers in four arrays.
//! [`PyHeap::paths`] then searches backwards from an object to the roots: the modules, the frames of
//! the functions that run, the exceptions that are handled, the contexts. No code of the program is
//! run: no `repr`, no attribute, no comparison.
//!
//! ```text
//! gc.get_objects ─▶ nodes ─ tp_traverse ─▶ edges ─▶ reversed ─▶ breadth first, from the object back
//! ```
//!
//! 1. A [`PyHeap`] holds a reference on every node until it is closed, and then has no nodes to find, so
//!    that an address in `addresses` is that of a live object. Only the frames of the search itself are not
//!    held: they are in `own`, which no search enters.
//! 2. While it is built, this thread keeps the interpreter lock and makes no Python object after
//!    `gc.get_objects`, so no collection runs, nothing is freed, and what `tp_traverse` reports was
//!    so at one moment.
//! 3. What CPython tells only through its layout is read in `layout`.
//!
//! What Python's collector cannot see, the graph does not have: references from C++, from Rust, and
//! from the evaluation of an expression in progress. They show as references that are counted but not
//! found ([`PyHeap::native`]).

mod layout;

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::{c_int, c_void};
use std::time::{Duration, Instant};

use pyo3::PyTypeInfo as _;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyModule, PyTuple, PyType};

use layout::{
    Variables, capsule_data, flags_of, frame_variables, frozen_objects, is_subtype, is_tracked,
    object, pointer, ref_count, type_of,
};
pub(crate) use layout::{heap_frame_variables, heap_instance_values};

/// Types with this flag have instances that the collector may track.
const HAVE_GC: u64 = 1 << 14;
/// Reference counts from here on mean that the object is immortal.
const IMMORTAL: isize = 1 << 30;
/// How often the clock is read: once in so many nodes.
const CLOCK_EVERY: usize = 1 << 10;
/// One search for paths visits no more nodes than this.
const MAX_VISITED: usize = 2_000_000;
/// And one for a further way no more than these.
const MAX_DETOUR: usize = 20_000;
/// References beyond these are not followed to more ways.
const MAX_TRIED: usize = 64;

// ---- the graph -------------------------------------------------------------------------------------

/// Positions of nodes by address: open addressing, at most three fifths full.
struct Table {
    slots: Vec<(usize, u32)>,
    len: usize,
}

impl Table {
    fn with_capacity(count: usize) -> Self {
        Self {
            slots: vec![(0, 0); (count * 2).next_power_of_two().max(1 << 10)],
            len: 0,
        }
    }

    fn slot(&self, address: usize) -> usize {
        let mask = self.slots.len() - 1;
        // Pages of memory are scattered; within one, neighbours go to neighbouring slots, for the cache's
        // sake. Objects are aligned to 16 bytes.
        let page = (address >> 12).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 24;
        let mut at = (page ^ ((address >> 4) & 0xFF)) & mask;
        while self.slots[at].0 != 0 && self.slots[at].0 != address {
            at = (at + 1) & mask;
        }
        at
    }

    fn get(&self, address: usize) -> Option<u32> {
        let (key, position) = self.slots[self.slot(address)];
        (key != 0).then_some(position)
    }

    fn insert(&mut self, address: usize, position: u32) {
        if self.len * 5 > self.slots.len() * 3 {
            let old = std::mem::take(&mut self.slots);
            self.slots = vec![(0, 0); old.len() * 2];
            for (key, position) in old.into_iter().filter(|(key, _)| *key != 0) {
                let at = self.slot(key);
                self.slots[at] = (key, position);
            }
        }
        let at = self.slot(address);
        self.len += usize::from(self.slots[at].0 == 0);
        self.slots[at] = (address, position);
    }
}

/// Why an object needs nobody to hold it.
#[derive(Clone, Debug)]
enum Root {
    /// A module, or its dict.
    Module(String),
    /// A function that runs, on the thread of this number.
    Frame(u64),
    /// The exception that the thread of this number handles.
    Exception(u64),
    /// What `contextvars` calls a context, held by the interpreter.
    Context,
}

/// What kinds of objects are noted when they are met.
struct Kinds<'py> {
    wanted: Vec<Bound<'py, PyType>>,
    by_type: HashMap<usize, Kind>,
    capsule: usize,
    array: usize,
}

#[derive(Clone, Copy)]
struct Kind {
    wanted: Option<u8>,
    has_gc: bool,
    traverse: Option<ffi::traverseproc>,
}

impl Kinds<'_> {
    fn of(&mut self, class: *mut ffi::PyTypeObject) -> Kind {
        let wanted = &self.wanted;
        *self
            .by_type
            .entry(class.expose_provenance())
            .or_insert_with(|| {
                let at = wanted.iter().position(|of| is_subtype(class, of));
                let has_gc = flags_of(class) & HAVE_GC != 0;
                // SAFETY: the type lives.
                let slot = unsafe { ffi::PyType_GetSlot(class, ffi::Py_tp_traverse) };
                // SAFETY: what this slot has is null or such a function.
                let traverse =
                    unsafe { std::mem::transmute::<*mut c_void, Option<ffi::traverseproc>>(slot) };
                Kind {
                    wanted: at.and_then(|at| u8::try_from(at).ok()),
                    has_gc,
                    traverse: traverse.filter(|_| has_gc),
                }
            })
    }
}

/// What is under construction; `visit` gets a pointer to it.
struct Builder<'py> {
    py: Python<'py>,
    addresses: Vec<usize>,
    table: Table,
    edges: Vec<u32>,
    kinds: Kinds<'py>,
    extra: Vec<Py<PyAny>>,
    capsules: Vec<u32>,
}

impl Builder<'_> {
    /// The position of an object, which becomes a node if it is none yet.
    fn node(&mut self, address: usize) -> u32 {
        if let Some(position) = self.table.get(address) {
            return position;
        }
        self.extra.push(object(self.py, address).unbind());
        self.push(address)
    }

    fn push(&mut self, address: usize) -> u32 {
        let position = u32::try_from(self.addresses.len()).unwrap_or(u32::MAX);
        self.addresses.push(address);
        self.table.insert(address, position);
        position
    }

    /// Notes that the object in progress refers to the one at this address.
    fn edge(&mut self, address: usize) {
        if let Some(position) = self.table.get(address) {
            self.edges.push(position);
            return;
        }
        let class = type_of(address);
        let number = class.expose_provenance();
        let kind = self.kinds.of(class);
        let is_capsule = number == self.kinds.capsule;
        // Tracked but not listed: frozen. Others matter only if they are asked for, or known to hold something.
        let is_node = kind.wanted.is_some()
            || is_capsule
            || number == self.kinds.array
            || (kind.has_gc && is_tracked(address));
        if is_node {
            let position = self.node(address);
            self.edges.push(position);
            if is_capsule {
                self.capsules.push(position);
            }
        }
    }
}

/// Called by `tp_traverse` for each reference.
extern "C" fn visit(referent: *mut ffi::PyObject, builder: *mut c_void) -> c_int {
    // SAFETY: the pointer that `Heap::build` passed along, which nothing else uses meanwhile.
    let builder = unsafe { &mut *builder.cast::<Builder<'_>>() };
    if !referent.is_null() {
        builder.edge(referent.expose_provenance());
    }
    0
}

/// The graph of Python's objects at the moment it was made. See the module's description.
#[pyclass(name = "Heap", module = "lastref._lastref")]
pub(crate) struct PyHeap {
    /// Keeps the tracked objects alive, and the others (invariant 1).
    tracked: Option<Py<PyList>>,
    extra: Vec<Py<PyAny>>,
    addresses: Vec<usize>,
    table: Table,
    /// Edges from node `n`: `targets[starts[n]..starts[n + 1]]`; and to it, likewise.
    starts: Vec<u32>,
    targets: Vec<u32>,
    sources_starts: Vec<u32>,
    sources: Vec<u32>,
    roots: HashMap<u32, Root>,
    /// The search's own frames: what they hold goes with them.
    own: HashSet<u32>,
    frozen: HashSet<u32>,
    instances: Vec<(u8, u32)>,
    capsules: Vec<u32>,
    /// For each node, the references on it that were counted but not found.
    uncounted: Vec<i32>,
    truncated: bool,
    knows_frozen: bool,
    until: Instant,
}

#[pymethods]
impl PyHeap {
    /// Reads the graph. `wanted` are types whose instances are noted; frames at the top of this
    /// thread whose code is in files that start with `own_files` are the search's own.
    #[new]
    fn new(
        py: Python<'_>,
        wanted: Vec<Bound<'_, PyType>>,
        own_files: &str,
        seconds: f64,
        max_edges: usize,
    ) -> PyResult<Self> {
        let until = Instant::now() + Duration::from_secs_f64(seconds.clamp(0.0, 1e6));
        let gc = py.import("gc")?;
        let modules = py
            .import("sys")?
            .getattr("modules")?
            .cast_into::<PyDict>()?;
        let modules: Vec<(String, Bound<'_, PyAny>)> = modules
            .iter()
            .filter_map(|(name, module)| Some((name.extract().ok()?, module)))
            .collect();
        let frames = running_frames(py, own_files)?;
        let exceptions = handled_exceptions(py)?;
        let context = py.import("contextvars")?.getattr("Context")?;
        let array = match py.import("sys")?.getattr("modules")?.get_item("numpy") {
            Ok(numpy) => numpy.getattr("ndarray")?.as_ptr().expose_provenance(),
            Err(_) => 0,
        };
        let capsule = pyo3::types::PyCapsule::type_object(py);
        let frozen = frozen_objects(py, &gc)?;
        let mut variables = Vec::new();
        for (frame, _) in &frames {
            variables.push(frame_variables(frame)?);
        }
        let tracked = gc.call_method0("get_objects")?.cast_into::<PyList>()?;
        // From here on no Python object is made (invariant 2).
        let mut builder = Builder {
            py,
            addresses: Vec::with_capacity(tracked.len() + (1 << 12)),
            table: Table::with_capacity(tracked.len() + (1 << 12)),
            edges: Vec::with_capacity(tracked.len() * 3),
            kinds: Kinds {
                wanted,
                by_type: HashMap::new(),
                capsule: capsule.as_ptr().expose_provenance(),
                array,
            },
            extra: Vec::new(),
            capsules: Vec::new(),
        };
        for tracked in tracked.iter() {
            builder.push(tracked.as_ptr().expose_provenance());
        }
        let mut heap = Self {
            tracked: Some(tracked.unbind()),
            extra: Vec::new(),
            addresses: Vec::new(),
            table: Table::with_capacity(0),
            starts: Vec::new(),
            targets: Vec::new(),
            sources_starts: Vec::new(),
            sources: Vec::new(),
            roots: HashMap::new(),
            own: HashSet::new(),
            frozen: HashSet::new(),
            instances: Vec::new(),
            capsules: Vec::new(),
            uncounted: Vec::new(),
            truncated: false,
            knows_frozen: frozen.is_some(),
            until,
        };
        for address in frozen.into_iter().flatten() {
            let node = builder.node(address);
            heap.frozen.insert(node);
        }
        for (name, module) in modules {
            let node = builder.node(module.as_ptr().expose_provenance());
            heap.roots.entry(node).or_insert(Root::Module(name.clone()));
            if let Ok(module) = module.cast::<PyModule>() {
                let dict = module.dict().as_ptr().expose_provenance();
                let node = builder.node(dict);
                heap.roots.entry(node).or_insert(Root::Module(name));
            }
        }
        let mut running = HashMap::new();
        let mut variables = variables.into_iter();
        for (frame, thread) in &frames {
            let address = frame.as_ptr().expose_provenance();
            let node = match thread {
                // Not held: it would hold this heap when its function has returned.
                None => builder
                    .table
                    .get(address)
                    .unwrap_or_else(|| builder.push(address)),
                Some(_) => builder.node(address),
            };
            running.insert(node, variables.next().unwrap_or_default());
            match thread {
                None => drop(heap.own.insert(node)),
                Some(thread) => drop(heap.roots.insert(node, Root::Frame(*thread))),
            }
        }
        for (exception, thread) in &exceptions {
            let node = builder.node(exception.as_ptr().expose_provenance());
            heap.roots.entry(node).or_insert(Root::Exception(*thread));
        }
        heap.traverse(&mut builder, &running, max_edges);
        heap.addresses = builder.addresses;
        heap.table = builder.table;
        heap.targets = builder.edges;
        heap.extra = builder.extra;
        heap.capsules = builder.capsules;
        (heap.sources_starts, heap.sources) = reversed(&heap.starts, &heap.targets);
        heap.uncounted = (0..heap.addresses.len())
            .map(|node| heap.count_unfound(position(node)))
            .collect();
        let context = context.as_ptr().expose_provenance();
        for node in 0..heap.addresses.len() {
            let is_context = type_of(heap.addresses[node]).expose_provenance() == context;
            if is_context && heap.uncounted[node] > 0 {
                heap.roots.entry(position(node)).or_insert(Root::Context);
            }
        }
        Ok(heap)
    }

    /// Lets go of everything. The heap finds nothing from then on. Needed since it holds what holds it:
    /// whatever existed before it, its user's variables among that.
    fn close(&mut self) {
        self.table = Table::with_capacity(0);
        self.instances.clear();
        self.capsules.clear();
        self.extra.clear();
        self.tracked = None;
    }

    /// How many objects were looked at.
    #[getter]
    fn num_objects(&self) -> usize {
        self.addresses.len()
    }

    /// How many references were found.
    #[getter]
    fn num_references(&self) -> usize {
        self.targets.len()
    }

    /// Whether time or space ran out before all was seen.
    #[getter]
    fn truncated(&self) -> bool {
        self.truncated
    }

    /// Whether all frozen objects were seen, not only those that others refer to.
    #[getter]
    fn knows_frozen(&self) -> bool {
        self.knows_frozen
    }

    /// The instances of one of the wanted types, by its position among them.
    fn instances<'py>(&self, py: Python<'py>, wanted: u8) -> PyResult<Bound<'py, PyList>> {
        let chosen = self.instances.iter().filter(|(of, _)| *of == wanted);
        let objects: Vec<_> = chosen.map(|(_, node)| self.object(py, *node)).collect();
        PyList::new(py, objects)
    }

    /// The capsules that hold a DLPack tensor nobody has taken, with the address of its data.
    fn capsules<'py>(&self, py: Python<'py>) -> Vec<(Bound<'py, PyAny>, usize)> {
        let mut found = Vec::new();
        let mut seen = HashSet::new();
        for node in self.capsules.iter().filter(|node| seen.insert(**node)) {
            let capsule = self.object(py, *node);
            if let Some(data) = capsule_data(&capsule) {
                found.push((capsule, data));
            }
        }
        found
    }

    /// Whether this object is among those that `gc.freeze` has hidden.
    fn is_frozen(&self, object: &Bound<'_, PyAny>) -> bool {
        self.find(object)
            .is_some_and(|node| self.frozen.contains(&node))
    }

    /// The ways from roots to one of these objects, shortest first: for each root the shortest, and one
    /// through each other reference to an object on a way. Each is the kind of root, its name, its thread, and the objects.
    #[expect(clippy::type_complexity, reason = "rows for Python")]
    fn paths<'py>(
        &self,
        py: Python<'py>,
        to: Vec<Bound<'py, PyAny>>,
        limit: usize,
    ) -> Vec<(
        &'static str,
        Option<String>,
        Option<u64>,
        Vec<Bound<'py, PyAny>>,
    )> {
        let goals = self.positions(&to);
        let mut ways = self.ways(&goals, limit, true);
        if ways.is_empty() {
            ways = self.ways(&goals, limit, false);
        }
        ways.into_iter()
            .map(|way| {
                let (kind, name, thread) = match &self.roots[&way[0]] {
                    Root::Module(name) => ("module", Some(name.clone()), None),
                    Root::Frame(thread) => ("frame", None, Some(*thread)),
                    Root::Exception(thread) => ("exception", None, Some(*thread)),
                    Root::Context => ("context", None, None),
                };
                let objects = way.iter().map(|node| self.object(py, *node)).collect();
                (kind, name, thread, objects)
            })
            .collect()
    }

    /// The shortest cycle that holds one of these objects: the cycle's objects, from one back to
    /// itself, then the way from it to the object. `None` if no cycle does.
    #[expect(clippy::type_complexity, reason = "a row for Python")]
    fn cycle<'py>(
        &self,
        py: Python<'py>,
        to: Vec<Bound<'py, PyAny>>,
    ) -> Option<(Vec<Bound<'py, PyAny>>, Vec<Bound<'py, PyAny>>)> {
        let (cycle, way) = self.shortest_cycle(&self.positions(&to))?;
        let objects = |nodes: Vec<u32>| {
            nodes
                .into_iter()
                .map(|node| self.object(py, node))
                .collect()
        };
        Some((objects(cycle), objects(way)))
    }

    /// Objects that hold one of these and are themselves held by references that were not found: the
    /// way to it from each, and how many such references there are.
    fn native<'py>(
        &self,
        py: Python<'py>,
        to: Vec<Bound<'py, PyAny>>,
        limit: usize,
    ) -> Vec<(i32, Vec<Bound<'py, PyAny>>)> {
        let goals = self.positions(&to);
        let search = self.backwards(&goals, false, &HashSet::new(), |_, _| false);
        let mut found = Vec::new();
        for node in &search.visited {
            let count = self.uncounted[*node as usize];
            if count > 0 && found.len() < limit {
                let way = search.way(*node);
                found.push((count, way.iter().map(|at| self.object(py, *at)).collect()));
            }
        }
        found
    }

    /// How many references on an object were found when the graph was made.
    fn found_references(&self, object: &Bound<'_, PyAny>) -> usize {
        self.find(object).map_or(0, |node| self.sources(node).len())
    }

    /// How many references on an object were counted but not found when the graph was made: those of
    /// C++ and Rust, and of expressions in progress.
    fn uncounted_references(&self, object: &Bound<'_, PyAny>) -> i32 {
        self.find(object)
            .map_or(0, |node| self.uncounted[node as usize])
    }
}

impl PyHeap {
    fn object<'py>(&self, py: Python<'py>, node: u32) -> Bound<'py, PyAny> {
        object(py, self.addresses[node as usize])
    }

    fn find(&self, object: &Bound<'_, PyAny>) -> Option<u32> {
        self.table.get(object.as_ptr().expose_provenance())
    }

    fn positions(&self, objects: &[Bound<'_, PyAny>]) -> Vec<u32> {
        objects
            .iter()
            .filter_map(|object| self.find(object))
            .collect()
    }

    /// Asks every node what it refers to; nodes are added meanwhile.
    fn traverse(
        &mut self,
        builder: &mut Builder<'_>,
        running: &HashMap<u32, Variables>,
        max_edges: usize,
    ) {
        let mut at = 0;
        while at < builder.addresses.len() {
            self.starts.push(position(builder.edges.len()));
            if at % CLOCK_EVERY == 0 && Instant::now() >= self.until
                || builder.edges.len() >= max_edges.min(u32::MAX as usize / 2)
            {
                self.truncated = true;
            }
            let node = position(at);
            let address = builder.addresses[at];
            let kind = builder.kinds.of(type_of(address));
            if let Some(wanted) = kind.wanted {
                self.instances.push((wanted, node));
            }
            if self.truncated {
                // The nodes there are keep their places.
            } else if let Some(variables) = running.get(&node) {
                for (_, value) in variables {
                    builder.edge(*value);
                }
            } else if type_of(address).expose_provenance() == builder.kinds.array {
                if let Ok(base) = object(builder.py, address).getattr("base") {
                    builder.edge(base.as_ptr().expose_provenance());
                }
            } else if let Some(traverse) = kind.traverse
                // What is not tracked is not ready to be asked.
                && is_tracked(address)
            {
                let argument: *mut c_void = std::ptr::from_mut(builder).cast();
                // SAFETY: the function of the object's own type, on a live object (invariant 1), as
                // the collector calls it: it calls `visit` and changes nothing.
                unsafe { traverse(pointer(address), visit, argument) };
            }
            at += 1;
        }
        self.starts.push(position(builder.edges.len()));
    }

    fn targets(&self, node: u32) -> &[u32] {
        let node = node as usize;
        &self.targets[self.starts[node] as usize..self.starts[node + 1] as usize]
    }

    fn sources(&self, node: u32) -> &[u32] {
        let node = node as usize;
        &self.sources[self.sources_starts[node] as usize..self.sources_starts[node + 1] as usize]
    }

    /// References on a node that were counted but not found, without this heap's own.
    fn count_unfound(&self, node: u32) -> i32 {
        let count = ref_count(self.addresses[node as usize]);
        if count >= IMMORTAL {
            return 0;
        }
        let found = isize::try_from(self.sources(node).len()).unwrap_or(isize::MAX);
        i32::try_from(count - found - 1).unwrap_or(0)
    }

    /// Whether this edge says nothing about who holds the object: every instance refers to its class,
    /// and every class to those it derives from.
    fn is_idle(&self, from: u32, to: u32) -> bool {
        let (from, to) = (self.addresses[from as usize], self.addresses[to as usize]);
        let class = type_of(from).expose_provenance();
        if class == to {
            return true;
        }
        let is_class = |address| {
            // Py_TPFLAGS_TYPE_SUBCLASS
            flags_of(type_of(address)) & (1 << 31) != 0
        };
        is_class(to) && is_class(from)
    }

    /// Backwards from the goals, breadth first, not beyond roots. `ends` is asked about every edge from
    /// a root, and ends the search by saying so.
    fn backwards(
        &self,
        goals: &[u32],
        skips_idle: bool,
        blocked: &HashSet<u32>,
        mut ends: impl FnMut(&Search, (u32, u32)) -> bool,
    ) -> Search {
        let mut search = Search::default();
        for goal in goals {
            if search.next.insert(*goal, None).is_none() {
                search.visited.push(*goal);
            }
        }
        let most = if blocked.is_empty() {
            MAX_VISITED
        } else {
            MAX_DETOUR
        };
        let mut at = 0;
        while at < search.visited.len() && search.visited.len() < most {
            let node = search.visited[at];
            at += 1;
            if at % CLOCK_EVERY == 0 && Instant::now() > self.until + Duration::from_secs(1) {
                break;
            }
            for from in self.sources(node) {
                let is_out = self.own.contains(from) || blocked.contains(from);
                if is_out || (skips_idle && self.is_idle(*from, node)) {
                    continue;
                }
                let root = self.roots.get(from);
                if root.is_some() && ends(&search, (*from, node)) {
                    return search;
                }
                // An exception that is handled may have a name as well.
                let is_last = matches!(root, Some(Root::Module(_) | Root::Frame(_)));
                if !is_last && !search.next.contains_key(from) {
                    search.next.insert(*from, Some(node));
                    search.visited.push(*from);
                }
            }
        }
        search
    }

    /// See [`PyHeap::paths`].
    fn ways(&self, goals: &[u32], limit: usize, skips_idle: bool) -> Vec<Vec<u32>> {
        let mut ways: Vec<Vec<u32>> = Vec::new();
        let mut seen = HashSet::new();
        for goal in goals.iter().filter(|goal| self.roots.contains_key(goal)) {
            ways.push(vec![*goal]);
        }
        self.backwards(
            goals,
            skips_idle,
            &HashSet::new(),
            |search, (root, node)| {
                if seen.insert((root, node)) {
                    let mut way = vec![root];
                    way.extend(search.way(node));
                    ways.push(way);
                }
                ways.len() >= limit
            },
        );
        // One more for each reference, to an object on a way, that is on no way yet.
        let mut shown: HashSet<(u32, u32)> = HashSet::new();
        let note = |way: &[u32], shown: &mut HashSet<(u32, u32)>| {
            shown.extend(way.windows(2).map(|pair| (pair[0], pair[1])));
        };
        for way in &ways {
            note(way, &mut shown);
        }
        let (mut tried, mut at) = (0, 0);
        while at < ways.len() {
            let way = ways[at].clone();
            at += 1;
            // Not through what follows on the way: that would go around in a circle.
            let mut blocked: HashSet<u32> = goals.iter().copied().collect();
            for place in (1..way.len()).rev() {
                let (node, rest) = (way[place], &way[place..]);
                blocked.insert(node);
                for holder in self.sources(node) {
                    let is_out = self.roots.contains_key(holder)
                        || blocked.contains(holder)
                        || self.own.contains(holder)
                        || (skips_idle && self.is_idle(*holder, node));
                    let is_enough = tried >= MAX_TRIED || ways.len() >= limit;
                    if is_out || is_enough || !shown.insert((*holder, node)) {
                        continue;
                    }
                    tried += 1;
                    let mut found = None;
                    self.backwards(&[*holder], skips_idle, &blocked, |search, (root, first)| {
                        found = Some([&[root], &*search.way(first), rest].concat());
                        true
                    });
                    if let Some(found) = found {
                        note(&found, &mut shown);
                        ways.push(found);
                    }
                }
            }
        }
        ways.sort_by_key(Vec::len);
        ways.truncate(limit);
        ways
    }

    /// See [`PyHeap::cycle`].
    fn shortest_cycle(&self, goals: &[u32]) -> Option<(Vec<u32>, Vec<u32>)> {
        let search = self.backwards(goals, true, &HashSet::new(), |_, _| false);
        // From each, nearest first, forward within what leads to the goals, until it comes back.
        for (number, start) in search.visited.iter().take(1 << 10).enumerate() {
            if Instant::now() > self.until + Duration::from_secs(1) {
                break;
            }
            // The circle may be a long one; but not for each.
            let most = if number < 4 { 1 << 20 } else { 1 << 16 };
            let mut came_from: HashMap<u32, u32> = HashMap::new();
            let mut queue = VecDeque::from([*start]);
            while let Some(node) = queue.pop_front() {
                for to in self.targets(node) {
                    let is_out = self.own.contains(to) || self.roots.contains_key(to);
                    if is_out || self.is_idle(node, *to) {
                        continue;
                    }
                    if to == start {
                        let mut cycle = vec![*start];
                        let mut at = node;
                        while at != *start {
                            cycle.push(at);
                            at = came_from[&at];
                        }
                        cycle.push(*start);
                        cycle.reverse();
                        return Some((cycle, search.way(*start)));
                    }
                    if search.next.contains_key(to) && !came_from.contains_key(to) {
                        came_from.insert(*to, node);
                        queue.push_back(*to);
                    }
                }
                if came_from.len() > most {
                    break;
                }
            }
        }
        None
    }
}

/// A search backwards: for each node it came to, the next one on the way to a goal.
#[derive(Default)]
struct Search {
    next: HashMap<u32, Option<u32>>,
    visited: Vec<u32>,
}

impl Search {
    /// The nodes from this one to a goal.
    fn way(&self, node: u32) -> Vec<u32> {
        let mut way = vec![node];
        let mut at = node;
        while let Some(Some(next)) = self.next.get(&at) {
            way.push(*next);
            at = *next;
        }
        way
    }
}

/// A position among nodes or edges; both are kept below 2^32.
fn position(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}

/// For each node, which nodes refer to it.
fn reversed(starts: &[u32], targets: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let count = starts.len() - 1;
    let mut ends = vec![0_u32; count + 1];
    for target in targets {
        ends[*target as usize + 1] += 1;
    }
    for at in 0..count {
        ends[at + 1] += ends[at];
    }
    let mut fill = ends.clone();
    let mut sources = vec![0_u32; targets.len()];
    for node in 0..count {
        for target in &targets[starts[node] as usize..starts[node + 1] as usize] {
            let at = &mut fill[*target as usize];
            sources[*at as usize] = position(node);
            *at += 1;
        }
    }
    (ends, sources)
}

/// The frames of all threads, each with its thread; the search's own with none.
fn running_frames<'py>(
    py: Python<'py>,
    own_files: &str,
) -> PyResult<Vec<(Bound<'py, PyAny>, Option<u64>)>> {
    let mut found = Vec::new();
    let this: u64 = py
        .import("threading")?
        .call_method0("get_ident")?
        .extract()?;
    let tops = py.import("sys")?.call_method0("_current_frames")?;
    for (thread, top) in tops.cast_into::<PyDict>()?.iter() {
        let thread: u64 = thread.extract()?;
        let mut is_own = thread == this;
        let mut frame = top;
        while !frame.is_none() {
            if is_own {
                let file = frame.getattr("f_code")?.getattr("co_filename")?;
                is_own = file.extract::<String>()?.starts_with(own_files);
            }
            let next = frame.getattr("f_back")?;
            found.push((frame, (!is_own).then_some(thread)));
            frame = next;
        }
    }
    Ok(found)
}

/// The exceptions that threads are handling.
fn handled_exceptions(py: Python<'_>) -> PyResult<Vec<(Bound<'_, PyAny>, u64)>> {
    let mut found = Vec::new();
    let all = py.import("sys")?.call_method0("_current_exceptions")?;
    for (thread, value) in all.cast_into::<PyDict>()?.iter() {
        // Before 3.12 a tuple of type, value and traceback.
        let exception = match value.cast::<PyTuple>() {
            Ok(triple) => triple.get_item(1)?,
            Err(_) => value,
        };
        if !exception.is_none() {
            found.push((exception, thread.extract()?));
        }
    }
    Ok(found)
}
