//! Where handles were made; with the feature `holders`.

use std::panic::Location;

use lastref::{DType, Device, Result, Tensor, sim};

/// The lines of this file where a tensor's handles were made.
fn lines(tensor: &Tensor) -> Vec<u32> {
    let place = |place: &&'static Location<'static>| {
        assert!(place.file().ends_with("holders.rs"), "{place}");
        place.line()
    };
    tensor.holders().iter().map(place).collect()
}

#[test]
fn each_handle_is_known_by_the_line_that_made_it() -> Result<()> {
    sim::enable("8GiB")?;
    let first = line!() + 1;
    let tensor = Tensor::empty_with([64, 4], (DType::F32, Device::Cuda(0)))?;
    let other = tensor.clone();
    let view = tensor.narrow(0, 0, 10)?;
    let transposed = view.transpose(0, 1)?;
    let again = tensor.downgrade().upgrade();
    assert_eq!(lines(&tensor), [0, 1, 2, 3, 4].map(|line| first + line));
    assert_eq!(lines(&tensor), lines(&transposed), "one storage");

    drop((other, again));
    assert_eq!(lines(&tensor), [0, 2, 3].map(|line| first + line));
    assert_eq!(tensor.ref_count(), 3);
    let host = tensor.cpu()?;
    assert_eq!(lines(&host), [line!() - 1]);
    let copy = host.copy()?;
    assert_eq!(lines(&copy), [line!() - 1]);
    let filled = Tensor::full([4], 7.0)?;
    assert_eq!(lines(&filled), [line!() - 1]);
    let stored = tensor.storage().clone();
    assert_eq!(lines(&tensor).last(), Some(&(line!() - 1)));
    drop(stored);
    Ok(())
}

#[test]
fn a_clone_made_in_a_library_is_known_by_the_line_in_there() -> Result<()> {
    let tensors = vec![Tensor::empty([4])?];
    let clones = tensors.clone();
    let places = tensors[0].holders();
    assert_eq!(places.len(), 2);
    assert!(places[0].file().ends_with("holders.rs"));
    assert!(!places[1].file().ends_with("holders.rs"), "{}", places[1]);
    drop(clones);
    Ok(())
}
