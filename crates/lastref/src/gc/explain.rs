//! Who holds it: a [`Cycle`] through an object, in words and as a picture.
//!
//! The graph is read object by object through [`Object::referents`], beside running threads: what
//! is shown was so at some moment for each object, not at one moment for all. Nothing here recurses
//! into the graph.

use std::collections::HashMap;
use std::fmt::{self, Write as _};

use super::object::Object;

/// Pictures show no more objects than this: first those of the path.
const MAX_DRAWN: usize = 24;

/// A way from an object back to itself, and everything that is in a cycle with it.
///
/// It holds handles on what it shows, so what it shows stays as long as it does.
///
/// ```
/// use lastref::gc::{self, Gc, Object, Slot, Trace};
///
/// #[derive(Trace)]
/// struct Hook {
///     module: Slot<Option<Gc<Module>>>,
/// }
/// #[derive(Trace)]
/// struct Module {
///     hooks: Slot<Vec<Gc<Hook>>>,
/// }
///
/// let module = Gc::new(Module { hooks: Slot::default() });
/// let hook = Gc::new(Hook { module: Slot::new(Some(module.clone())) });
/// module.hooks.lock().push(hook);
///
/// let cycle = gc::find_cycle(&Object::from(&module)).unwrap();
/// assert_eq!(cycle.path().len(), 2);
/// assert!(cycle.to_string().starts_with("a cycle of 2 objects:"));
/// assert!(cycle.to_dot().starts_with("digraph"));
/// ```
#[derive(Debug)]
pub struct Cycle {
    /// The path first, then what else is in a cycle with it.
    members: Vec<Object>,
    path_len: usize,
    /// Edges between members, as often as there are such; each is two positions.
    edges: Vec<(usize, usize)>,
}

/// The shortest cycle through an object, and all objects that it reaches and that reach it.
///
/// `None` if there is none, as far as can be seen: objects of which a slot is locked meanwhile count
/// as referring to nothing. Costs a look at everything that can be reached from the object.
#[must_use]
pub fn find_cycle(through: &Object) -> Option<Cycle> {
    let reached = Reached::from(through);
    let path = reached.path_back()?;
    let mut is_member = reached.reaching_the_first();
    for at in &path {
        is_member[*at] = false; // They come first.
    }
    let others = (0..reached.objects.len()).filter(|at| is_member[*at]);
    let order: Vec<usize> = path.iter().copied().chain(others).collect();
    let position: HashMap<usize, usize> =
        order.iter().enumerate().map(|(p, at)| (*at, p)).collect();
    let edges = order.iter().enumerate().flat_map(|(from, at)| {
        let targets = reached.edges[*at].iter();
        targets
            .filter_map(|to| position.get(to))
            .map(move |to| (from, *to))
    });
    Some(Cycle {
        path_len: path.len(),
        edges: edges.collect(),
        members: order
            .iter()
            .map(|at| reached.objects[*at].clone())
            .collect(),
    })
}

/// What can be reached from an object, which is the first.
struct Reached {
    objects: Vec<Object>,
    /// For each object, the positions of those it refers to.
    edges: Vec<Vec<usize>>,
    /// For each object but the first, from which it was reached first: on a shortest way.
    parents: Vec<usize>,
}

impl Reached {
    fn from(first: &Object) -> Self {
        let mut positions = HashMap::from([(first.id(), 0)]);
        let mut reached = Self {
            objects: vec![first.clone()],
            edges: Vec::new(),
            parents: vec![0],
        };
        while reached.edges.len() < reached.objects.len() {
            let at = reached.edges.len();
            let mut edges = Vec::new();
            for target in reached.objects[at].referents().unwrap_or_default() {
                let next = reached.objects.len();
                let position = *positions.entry(target.id()).or_insert(next);
                edges.push(position);
                if position == next {
                    reached.objects.push(target);
                    reached.parents.push(at);
                }
            }
            reached.edges.push(edges);
        }
        reached
    }

    /// The positions on the shortest way from the first object back to it.
    fn path_back(&self) -> Option<Vec<usize>> {
        // Positions rise with the distance from the first.
        let last = (0..self.edges.len()).find(|at| self.edges[*at].contains(&0))?;
        let mut path = vec![last];
        let mut at = last;
        while at != 0 {
            at = self.parents[at];
            path.push(at);
        }
        path.reverse();
        Some(path)
    }

    /// Which objects reach the first: with those it reaches, its strongly connected component.
    fn reaching_the_first(&self) -> Vec<bool> {
        let mut referrers = vec![Vec::new(); self.edges.len()];
        for (from, targets) in self.edges.iter().enumerate() {
            for to in targets {
                referrers[*to].push(from);
            }
        }
        let mut reaches = vec![false; self.edges.len()];
        reaches[0] = true;
        let mut work = vec![0];
        while let Some(at) = work.pop() {
            for from in &referrers[at] {
                if !std::mem::replace(&mut reaches[*from], true) {
                    work.push(*from);
                }
            }
        }
        reaches
    }
}

/// A type's name without the modules it lies in.
fn short(name: &str) -> String {
    let mut out = String::new();
    let mut segment = String::new();
    let mut chars = name.chars().peekable();
    while let Some(c) = chars.next() {
        if c == ':' && chars.peek() == Some(&':') {
            chars.next();
            segment.clear();
        } else if c.is_alphanumeric() || c == '_' {
            segment.push(c);
        } else {
            out.push_str(&std::mem::take(&mut segment));
            out.push(c);
        }
    }
    out + &segment
}

/// What separates an address from the name before it.
const AT: &str = " at ";

fn label(object: &Object) -> String {
    format!("{}{AT}{:#x}", short(object.type_name()), object.id())
}

impl Cycle {
    /// The objects of the shortest cycle: each refers to the next, and the last to the first.
    #[must_use]
    pub fn path(&self) -> &[Object] {
        &self.members[..self.path_len]
    }

    /// Every object that is in some cycle with the first, those of the path included.
    #[must_use]
    pub fn objects(&self) -> &[Object] {
        &self.members
    }

    fn is_on_path(&self, (from, to): (usize, usize)) -> bool {
        from < self.path_len && to == (from + 1) % self.path_len
    }

    /// Handles on an object that are not edges shown here: on the stack, in a collection of the
    /// standard library, or in an object outside the cycle. The handle in this value is not counted.
    fn num_from_elsewhere(&self, at: usize) -> usize {
        let edges = self.edges.iter().filter(|(_, to)| *to == at).count();
        self.members[at].strong_count().saturating_sub(edges)
    }

    /// Members that are drawn, and the edges between them.
    fn drawn(&self) -> (&[Object], Vec<(usize, usize)>) {
        let members = &self.members[..self.members.len().min(MAX_DRAWN)];
        let mut edges: Vec<_> = self.edges.clone();
        edges.retain(|(from, to)| *from < members.len() && *to < members.len());
        edges.sort_unstable();
        edges.dedup();
        (members, edges)
    }

    /// What pictures say if they do not show everything.
    fn left_out(&self) -> Option<String> {
        let more = self.members.len().checked_sub(MAX_DRAWN + 1)? + 1;
        Some(format!("and {more} more objects"))
    }

    /// A graph in the language of Graphviz; the shortest cycle is bold. Shows 24 objects at most.
    #[must_use]
    pub fn to_dot(&self) -> String {
        let (members, edges) = self.drawn();
        let mut dot =
            String::from("digraph cycle {\n    node [shape=box, fontname=\"sans-serif\"];\n");
        for (at, object) in members.iter().enumerate() {
            let text = label(object).replace(AT, "\\n").replace('"', "\\\"");
            let _ = writeln!(dot, "    n{at} [label=\"{text}\"];");
        }
        for edge in edges {
            let style = if self.is_on_path(edge) {
                " [penwidth=2]"
            } else {
                " [color=gray]"
            };
            let _ = writeln!(dot, "    n{} -> n{}{style};", edge.0, edge.1);
        }
        if let Some(text) = self.left_out() {
            let _ = writeln!(dot, "    label=\"{text}\";");
        }
        dot + "}\n"
    }

    /// The same graph as a picture, with the path around it in order.
    #[must_use]
    pub fn to_svg(&self) -> String {
        let (members, edges) = self.drawn();
        let labels: Vec<(String, String)> = members
            .iter()
            .map(|object| (short(object.type_name()), format!("{:#x}", object.id())))
            .collect();
        svg::picture(
            &labels,
            edges.iter().map(|edge| (*edge, self.is_on_path(*edge))),
            self.left_out().as_deref(),
        )
    }
}

impl fmt::Display for Cycle {
    /// The path, an object a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.path_len == 1 { "" } else { "s" };
        write!(f, "a cycle of {} object{plural}:", self.path_len)?;
        for (at, object) in self.path().iter().enumerate() {
            let arrow = if at == 0 { "  " } else { "→ " };
            write!(
                f,
                "\n    {arrow}{}{AT}{:#x}",
                object.type_name(),
                object.id()
            )?;
            match self.num_from_elsewhere(at) {
                0 => {}
                1 => write!(f, ", 1 handle on it from elsewhere")?,
                more => write!(f, ", {more} handles on it from elsewhere")?,
            }
        }
        write!(f, "\n    → the first")?;
        match self.members.len() - self.path_len {
            0 => Ok(()),
            1 => write!(f, "\n1 more object is in a cycle with these"),
            more => write!(f, "\n{more} more objects are in cycles with these"),
        }
    }
}

/// Boxes on a circle and arrows between them.
mod svg {
    use std::f64::consts::TAU;
    use std::fmt::Write as _;

    const BOX_HEIGHT: f64 = 40.0;
    /// The width of a character at most.
    const CHAR: f64 = 7.8;
    const MARGIN: f64 = 24.0;
    /// How far the head of an arrow stays from its box.
    const GAP: f64 = 3.0;

    type Point = (f64, f64);

    /// `edges` are pairs of positions among the labels, and whether they are bold.
    pub(super) fn picture(
        labels: &[(String, String)],
        edges: impl Iterator<Item = ((usize, usize), bool)>,
        note: Option<&str>,
    ) -> String {
        let longest = labels
            .iter()
            .map(|(name, at)| name.chars().count().max(at.len()));
        let width = longest.max().unwrap_or(1) as f64 * CHAR + 20.0;
        let count = labels.len() as f64;
        let radius = if labels.len() == 1 {
            0.0
        } else {
            // Neighbours on the circle do not touch, wherever they are.
            (width.hypot(BOX_HEIGHT) + 30.0) / 2.0 / (TAU / 2.0 / count).sin()
        };
        let loops = 40.0;
        let half = (
            radius + width / 2.0 + MARGIN,
            radius + BOX_HEIGHT / 2.0 + loops + MARGIN,
        );
        let place = |at: usize| -> Point {
            let angle = TAU * at as f64 / count - TAU / 4.0;
            (half.0 + radius * angle.cos(), half.1 + radius * angle.sin())
        };
        let (total_width, total_height) = (2.0 * half.0, 2.0 * half.1);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{total_width:.0}\" height=\"{total_height:.0}\" \
             viewBox=\"0 0 {total_width:.0} {total_height:.0}\" font-family=\"sans-serif\" font-size=\"13\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <defs><marker id=\"head\" viewBox=\"0 0 10 10\" refX=\"9\" refY=\"5\" markerWidth=\"9\" markerHeight=\"9\" \
             markerUnits=\"userSpaceOnUse\" orient=\"auto\"><path d=\"M0 0L10 5L0 10z\" fill=\"context-stroke\"/>\
             </marker></defs>\n"
        );
        for ((from, to), bold) in edges {
            let path = if from == to {
                around(place(from), width)
            } else {
                arrow(place(from), place(to), width)
            };
            let stroke = if bold {
                "stroke=\"#111\" stroke-width=\"2.2\""
            } else {
                "stroke=\"#999\""
            };
            let _ = writeln!(
                svg,
                "<path d=\"{path}\" fill=\"none\" {stroke} marker-end=\"url(#head)\"/>"
            );
        }
        for (at, (name, address)) in labels.iter().enumerate() {
            let (x, y) = place(at);
            let _ = writeln!(
                svg,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{BOX_HEIGHT}\" rx=\"5\" \
                 fill=\"#f3f6fa\" stroke=\"#345\"/>\n\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#667\" font-size=\"11\">{address}</text>",
                x - width / 2.0,
                y - BOX_HEIGHT / 2.0,
                y - 3.0,
                escaped(name),
                y + 13.0,
            );
        }
        if let Some(note) = note {
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{note}</text>",
                half.0,
                total_height - 8.0
            );
        }
        svg + "</svg>\n"
    }

    fn escaped(text: &str) -> String {
        text.replace('&', "&amp;")
            .replace('<', "&lt;")
            .replace('>', "&gt;")
    }

    /// Where the way from the middle of a box towards a point leaves the box.
    fn leaves(middle: Point, towards: Point, width: f64) -> Point {
        let (dx, dy) = (towards.0 - middle.0, towards.1 - middle.1);
        let part = ((width / 2.0 + GAP) / dx.abs()).min((BOX_HEIGHT / 2.0 + GAP) / dy.abs());
        (middle.0 + dx * part, middle.1 + dy * part)
    }

    /// An arrow that bends to its left, so that one each way between two boxes are two.
    fn arrow(from: Point, to: Point, width: f64) -> String {
        let (dx, dy) = (to.0 - from.0, to.1 - from.1);
        let bend = (
            f64::midpoint(from.0, to.0) + dy * 0.14,
            f64::midpoint(from.1, to.1) - dx * 0.14,
        );
        let (start, end) = (leaves(from, bend, width), leaves(to, bend, width));
        format!(
            "M{:.1} {:.1}Q{:.1} {:.1} {:.1} {:.1}",
            start.0, start.1, bend.0, bend.1, end.0, end.1
        )
    }

    /// From the top of a box back to it.
    fn around((x, y): Point, width: f64) -> String {
        let top = y - BOX_HEIGHT / 2.0 - GAP;
        let side = (width / 4.0).min(30.0);
        format!(
            "M{:.1} {top:.1}C{:.1} {:.1} {:.1} {:.1} {:.1} {top:.1}",
            x + side,
            x + side * 1.6,
            top - 38.0,
            x - side * 1.6,
            top - 38.0,
            x - side
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gc::{Gc, Slot};

    #[derive(crate::gc::Trace)]
    struct Node(Slot<Vec<Gc<Node>>>);

    /// A graph of so many nodes with these edges. A test empties it again, by [`dismantle`].
    fn graph(count: usize, edges: &[(usize, usize)]) -> Vec<Gc<Node>> {
        let nodes: Vec<_> = (0..count).map(|_| Gc::new(Node(Slot::default()))).collect();
        for (from, to) in edges {
            nodes[*from].0.lock().push(nodes[*to].clone());
        }
        nodes
    }

    fn dismantle(nodes: &[Gc<Node>]) {
        for node in nodes {
            node.0.take();
        }
    }

    fn positions(objects: &[Object], nodes: &[Gc<Node>]) -> Vec<usize> {
        let position =
            |object: &Object| nodes.iter().position(|node| Object::from(node) == *object);
        objects.iter().filter_map(position).collect()
    }

    #[test]
    fn the_shortest_way_back_is_found_and_the_component_is_whole() {
        // 0 → 1 → 2 → 0 is shorter than 0 → 3 → 4 → 5 → 0; 6 is reached, 7 reaches.
        let edges = [
            (0, 3),
            (3, 4),
            (4, 5),
            (5, 0),
            (0, 1),
            (1, 2),
            (2, 0),
            (2, 6),
            (7, 0),
        ];
        let nodes = graph(8, &edges);
        let cycle = find_cycle(&Object::from(&nodes[0])).unwrap();
        assert_eq!(positions(cycle.path(), &nodes), [0, 1, 2]);
        let mut members = positions(cycle.objects(), &nodes);
        members.sort_unstable();
        assert_eq!(members, [0, 1, 2, 3, 4, 5]);
        assert!(find_cycle(&Object::from(&nodes[6])).is_none());
        assert!(find_cycle(&Object::from(&nodes[7])).is_none());
        let text = cycle.to_string();
        assert!(
            text.contains("3 more objects are in cycles with these"),
            "{text}"
        );
        // The variable in `nodes`, and 7.
        assert!(text.contains("2 handles on it from elsewhere"), "{text}");
        dismantle(&nodes);
    }

    #[test]
    fn a_locked_slot_hides_its_edges_and_nobody_waits() {
        let nodes = graph(1, &[(0, 0)]);
        let object = Object::from(&nodes[0]);
        let guard = nodes[0].0.lock();
        assert!(find_cycle(&object).is_none());
        drop(guard);
        assert_eq!(find_cycle(&object).unwrap().path().len(), 1);
        dismantle(&nodes);
    }

    #[test]
    fn long_rings_need_no_stack_and_pictures_say_what_they_leave_out() {
        let count = 100_000;
        let edges: Vec<_> = (0..count).map(|at| (at, (at + 1) % count)).collect();
        let nodes = graph(count, &edges);
        let cycle = find_cycle(&Object::from(&nodes[0])).unwrap();
        assert_eq!(cycle.path().len(), count);
        let left_out = format!("and {} more objects", count - MAX_DRAWN);
        assert!(cycle.to_svg().contains(&left_out));
        assert!(cycle.to_dot().contains(&left_out));
        assert_eq!(cycle.to_dot().matches(" -> ").count(), MAX_DRAWN - 1);
        dismantle(&nodes);
    }

    #[test]
    fn pictures_show_every_object_and_edge_once() {
        let nodes = graph(3, &[(0, 1), (1, 0), (1, 2), (2, 1), (1, 2), (2, 2)]);
        let cycle = find_cycle(&Object::from(&nodes[0])).unwrap();
        let (dot, svg) = (cycle.to_dot(), cycle.to_svg());
        assert_eq!(dot.matches("label=").count(), 3);
        assert_eq!(dot.matches(" -> ").count(), 5, "{dot}");
        assert_eq!(dot.matches("penwidth").count(), 2, "the way back is bold");
        assert_eq!(svg.matches("marker-end").count(), 5);
        assert_eq!(svg.matches("<rect x").count(), 3);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        if let Ok(file) = std::env::var("LASTREF_TEST_SVG") {
            std::fs::write(file, svg).unwrap();
        }
        dismantle(&nodes);
    }

    #[test]
    fn names_lose_their_modules_and_nothing_else() {
        assert_eq!(short("a::b::Node"), "Node");
        assert_eq!(short("alloc::vec::Vec<a::B, [c::D; 3]>"), "Vec<B, [D; 3]>");
        assert_eq!(short("u64"), "u64");
        assert_eq!(short("dyn a::T + core::marker::Send"), "dyn T + Send");
    }
}
